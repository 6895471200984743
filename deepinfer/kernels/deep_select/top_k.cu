// Exact top-k of rows of floats, by one cluster of CLUSTER blocks a row.
//
// A row is read once, from memory at full speed, and stays in registers as 16 leading bits of every value. Of each
// thread's values the largest goes to all blocks of the cluster: the k-th largest of those is a lower bound of the k-th
// largest value, and a close one. The few values above it (the candidates) are sent to all blocks, too, each of which
// then finds the threshold and the places of its own values in the output without asking the others again. Chosen
// positions are written in ascending order; of equal values the first are chosen. Pieces of 256 values are dealt to the
// blocks in turn, so that scores of a short context, or a cluster of large ones, do not fall to one of them.
//
// If a block has more candidates than its list holds (many equal values), the cluster counts digits of all values
// instead: a radix select whose histograms are added up through distributed shared memory. Any input gives the exact
// result; -inf and NaN are never chosen.
//
// Macros: BF16 (values are BF16, else float32), CLUSTER.
#include "cluster.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define VECTORS 8  // groups of 8 values that a thread takes of a chunk
#define PIECE 256  // values of a warp's 32 groups
#define PIECES (VECTORS * WARPS)  // of a block and chunk
#define BINS 2048
#define LOWEST 0x007Fu  // leading ordered bits of -inf
#define SHIFT (BF16 ? 16 : 0)  // bits that BF16 values do not have

struct Params {
    const void* scores;
    int* out;                // [rows, k]
    const long long* row_k;  // how many of each row, or null: k
    long long row_stride;    // in values
    int width;
    int k;
    int vector_end;  // values below may be read 16 bytes at a time
    int chunks;      // of CLUSTER * 16384 values
    int list;        // candidates that a block may have
    int fine;        // maxima of each 8 values instead of each thread
};

struct Shared {
    u64 warp_sums[WARPS];
    u32 counts[CLUSTER];  // candidates of each block
    u32 count;
    u32 pairs;
    u32 bound;
    u32 threshold, equal_wanted;
    u32 digit, above, found;
    u32 total;
};

// Ordered as the floats are; both zeros are equal, NaN is 0, below all.
DEVICE u32 ordered(u32 bits) {
    bits = negated_float(bits);
    return ~(bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u));
}

DEVICE u32 load_bits(const u8* row, int at) {
    return BF16 ? static_cast<u32>(reinterpret_cast<const u16*>(row)[at]) << 16 : reinterpret_cast<const u32*>(row)[at];
}

// The first of the 8 values that this thread has in `vector` of all chunks.
DEVICE int first_of(int vector, u32 rank) {
    int piece = (vector * WARPS + threadIdx.x / 32) * CLUSTER + rank;
    return piece * PIECE + threadIdx.x % 32 * 8;
}

// Leading 16 ordered bits of two float32 numbers.
DEVICE u32 leading(u32 low, u32 high) { return ordered(low) >> 16 | (ordered(high) & 0xFFFF0000u); }

// keys[4 v + i]: leading ordered bits of values 2 i and 2 i + 1 of vector v, those of -inf past the row's end.
DEVICE void load_chunk(const Params& p, const u8* row, int chunk, u32 rank, u32 (&keys)[4 * VECTORS]) {
    const u32 hidden = BF16 ? 0xFF80FF80u : 0xFF800000u;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        int first = first_of(chunk * VECTORS + v, rank);
        uint4 value = {hidden, hidden, hidden, hidden};
#if BF16
        if (first < p.vector_end) value = *reinterpret_cast<const uint4*>(row + first * 2ll);
        keys[4 * v] = value.x, keys[4 * v + 1] = value.y, keys[4 * v + 2] = value.z, keys[4 * v + 3] = value.w;
#else
        uint4 second = value;
        if (first < p.vector_end) {
            value = reinterpret_cast<const uint4*>(row + first * 4ll)[0];
            second = reinterpret_cast<const uint4*>(row + first * 4ll)[1];
        }
        keys[4 * v] = leading(value.x, value.y), keys[4 * v + 1] = leading(value.z, value.w);
        keys[4 * v + 2] = leading(second.x, second.y), keys[4 * v + 3] = leading(second.z, second.w);
#endif
    }
#if BF16
#pragma unroll
    for (int i = 0; i < 4 * VECTORS; i++) {
        u32 pair = negated_bf16(keys[i]);
        keys[i] = ~(pair ^ (signs(pair) | 0x80008000u));
    }
#endif
    if (p.vector_end == p.width) return;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {  // unaligned rows, and the last values of others
        int first = first_of(chunk * VECTORS + v, rank);
        if (first < p.vector_end || first >= p.width) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 bits[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int at = first + 2 * i + j;
                bits[j] = at < p.width ? load_bits(row, at) : 0xFF800000u;
            }
            keys[4 * v + i] = leading(bits[0], bits[1]);
        }
    }
}

// Inclusive sum over the threads of the block.
DEVICE u64 inclusive_sum(u64 value, Shared& s) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u64 other = __shfl_up_sync(0xFFFFFFFFu, value, step);
        if (lane >= step) value += other;
    }
    __syncthreads();
    if (lane == 31) s.warp_sums[warp] = value;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++) value += i < warp ? s.warp_sums[i] : 0;
    return value;
}

// Sum over the block of a count of each warp.
DEVICE u32 block_sum(u32 warp_count, Shared& s) {
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.warp_sums[threadIdx.x / 32] = warp_count;
    __syncthreads();
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += static_cast<u32>(s.warp_sums[i]);
    return sum;
}

// A bound that at least `wanted` of the maxima reach, and not many more if they differ. Maxima are two a word,
// 0x8000 + key / 2, 1024 words a warp. By the first warp or (EVERY) by all.
template <bool EVERY>
DEVICE u32 find_bound(const u32* maxima, u32 wanted, Shared& s) {
    const uint4* words = reinterpret_cast<const uint4*>(maxima) + (EVERY ? threadIdx.x : threadIdx.x % 32);
    const int stride = EVERY ? THREADS : 32;
    u32 least = 0xFFFFFFFFu, most = 0;
#pragma unroll 2
    for (int i = 0; i < 8; i++) {
        uint4 word = words[i * stride];
        least = __vminu2(__vminu2(least, word.x), __vminu2(word.y, __vminu2(word.z, word.w)));
        most = __vmaxu2(__vmaxu2(most, word.x), __vmaxu2(word.y, __vmaxu2(word.z, word.w)));
    }
    least = __reduce_min_sync(0xFFFFFFFFu, min(least & 0xFFFF, least >> 16));
    most = __reduce_max_sync(0xFFFFFFFFu, max(most & 0xFFFF, most >> 16));
    if (EVERY) least = 0x8000, most = 0xFFFF;
    // Invariant: enough maxima reach low (checked first), too few reach high.
    u32 low = max(least & 0x7FFF, LOWEST / 2 + 1), high = (most & 0x7FFF) + 1;
    bool first = true;
    while (first || high - low > 1) {
        u32 middle = first ? low : low + (high - low) / 2;
        u32 twice = middle << 16 | middle, count = 0;
#pragma unroll 2
        for (int i = 0; i < 8; i++) {
            uint4 word = words[i * stride];
            count += (word.x - twice >> 15 & 0x00010001) + (word.y - twice >> 15 & 0x00010001);
            count += (word.z - twice >> 15 & 0x00010001) + (word.w - twice >> 15 & 0x00010001);
        }
        count = __reduce_add_sync(0xFFFFFFFFu, (count & 0xFFFF) + (count >> 16));
        if (EVERY) count = block_sum(count, s);
        if (first && count < wanted) return LOWEST + 1;  // all that are above -inf
        first = false;
        if (count < wanted) {
            high = middle;
        } else {
            low = middle;
            if (count <= wanted + wanted / 4) break;
        }
    }
    return low << 1;
}

// s.threshold and s.equal_wanted: chosen are the keys above the first and so many of those equal to it.
// By the first warp, for at most 128 candidates a block, or (EVERY) by all.
template <bool EVERY>
DEVICE void find_threshold(const uint2* lists, int list, u32 wanted, u32 total, Shared& s) {
    u32 keys[32];
    u32 high = 0;
    if (!EVERY) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            int rank = CLUSTER == 1 ? 0 : i / 4;
            u32 at = threadIdx.x + 32 * (CLUSTER == 1 ? i : i % 4);
            keys[i] = at < s.counts[rank] ? lists[rank * list + at].x >> SHIFT : 0;
            high = max(high, keys[i]);
        }
        high = __reduce_max_sync(0xFFFFFFFFu, high);
    } else {
        high = 0xFFFFFFFFu >> SHIFT;
    }
    u32 low = s.bound << (16 - SHIFT), above = 0;  // `total` reach low, `above` are above high
    u32 equal_wanted = wanted;
    while (low < high) {
        u32 middle = low + (high - low + 1) / 2, count = 0;
        if (!EVERY) {
#pragma unroll
            for (int i = 0; i < 32; i++) count += keys[i] >= middle;
        } else {
            for (int rank = 0; rank < CLUSTER; rank++) {
                for (u32 i = threadIdx.x; i < s.counts[rank]; i += THREADS) {
                    count += lists[rank * list + i].x >> SHIFT >= middle;
                }
            }
        }
        count = __reduce_add_sync(0xFFFFFFFFu, count);
        if (EVERY) count = block_sum(count, s);
        if (count == wanted) {
            low = middle - 1, above = count;
            break;
        }
        if (count > wanted) low = middle;
        else high = middle - 1, above = count;
    }
    equal_wanted -= above;
    if (threadIdx.x == 0) s.threshold = low, s.equal_wanted = equal_wanted;
}

#if CLUSTER > 1
// The bin with the wanted-th largest of what the cluster's histograms counted, and how many lie in higher bins.
// s.found is 0 if there are fewer.
DEVICE void find_bin(const u32* histogram, u32 wanted, Shared& s) {
    __syncthreads();
    if (threadIdx.x == 0) s.found = 0;
    u32 base = BINS - 8 * (threadIdx.x + 1);
    u32 address = shared_address(histogram + base);
    u32 bins[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int rank = 0; rank < CLUSTER; rank++) {
        uint4 part = load_remote4(remote(address, rank)), next = load_remote4(remote(address, rank) + 16);
        bins[0] += part.x, bins[1] += part.y, bins[2] += part.z, bins[3] += part.w;
        bins[4] += next.x, bins[5] += next.y, bins[6] += next.z, bins[7] += next.w;
    }
    u32 own = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) own += bins[i];
    u32 end = static_cast<u32>(inclusive_sum(own, s));
    u32 above = end - own;
    if (above < wanted && wanted <= end) {
#pragma unroll
        for (int i = 7; i >= 0; i--) {
            if (above < wanted && wanted <= above + bins[i]) {
                s.digit = base + i;
                s.above = above;
                s.found = 1;
                above = wanted;  // ends the search
            } else {
                above += bins[i];
            }
        }
    }
    __syncthreads();
}

// One more at bins[bin] for every lane that is `counted`; lanes of the same bin together.
DEVICE void count_bin(u32* bins, u32 bin, bool counted) {
    u32 same = __match_any_sync(0xFFFFFFFFu, counted ? bin : ~0u);
    if (counted && (same & (1u << threadIdx.x % 32) - 1) == 0) atomicAdd(bins + bin, __popc(same));
}

// BODY sees `key` and `position` of every value of this block above the bound.
#define FOR_EACH_VALUE(BODY)                                                             \
    for (int vector = 0; vector < p.chunks * VECTORS; vector++) {                        \
        int first = first_of(vector, rank);                                              \
        for (int i = 0; i < 8; i++) {                                                    \
            int position = first + i;                                                    \
            u32 key = position < p.width ? ordered(load_bits(row, position)) : 0;        \
            bool inside = key >> 16 >= bound;                                            \
            BODY                                                                         \
        }                                                                                \
    }

// As find_threshold, of all values above the bound instead of listed ones. The same for all threads.
DEVICE void count_digits(const Params& p, const u8* row, u32 rank, u32 bound, u32 wanted, u32* bins, Shared& s) {
    for (int i = threadIdx.x; i < 3 * BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
    FOR_EACH_VALUE(count_bin(bins, key >> 21, inside);)
    cluster_sync();
    find_bin(bins, wanted, s);
    u32 threshold = s.digit, equal_wanted = wanted - s.above;
    bool all = !s.found;  // fewer than wanted values above -inf
    FOR_EACH_VALUE(count_bin(bins + BINS, key >> 10 & 2047, inside && key >> 21 == threshold);)
    cluster_sync();
    if (!all) {
        find_bin(bins + BINS, equal_wanted, s);
        threshold = threshold << 11 | s.digit;
        equal_wanted -= s.above;
    }
    FOR_EACH_VALUE(count_bin(bins + 2 * BINS, key & 1023, inside && key >> 10 == threshold);)
    cluster_sync();
    if (!all) {
        find_bin(bins + 2 * BINS, equal_wanted, s);
        threshold = threshold << 10 | s.digit;
        equal_wanted -= s.above;
    }
    if (threadIdx.x == 0) s.threshold = all ? 0 : threshold >> SHIFT, s.equal_wanted = all ? 0 : equal_wanted;
    __syncthreads();
}
#endif

KERNEL(THREADS, 4) CLUSTER_DIMS top_k(const Params p) {
    SHARED_MEMORY(memory);
    Shared& s = *reinterpret_cast<Shared*>(memory);
    int num_maxima = THREADS * (p.fine ? VECTORS : 1);  // of a block
    int words = p.chunks * PIECES * (PIECE / 32), pieces = p.chunks * PIECES * CLUSTER;
    uint2* lists = reinterpret_cast<uint2*>(memory + (sizeof(Shared) + 15) / 16 * 16);  // (key, position) by block
    u16* maxima = reinterpret_cast<u16*>(lists + CLUSTER * p.list);
    u32* pairs = reinterpret_cast<u32*>(maxima + CLUSTER * num_maxima);  // positions of two values
    u32* chosen_bits = pairs + p.list;
    u32* equal_bits = chosen_bits + words;
    u32* before = equal_bits + words;  // of each piece of the row: chosen and, times 65536, equal to the threshold
    int thread = threadIdx.x;
    u32 rank = blockIdx.x % CLUSTER;
    long long row_index = blockIdx.y;
    const u8* row = static_cast<const u8*>(p.scores) + row_index * p.row_stride * (BF16 ? 2 : 4);
    int* out = p.out + row_index * p.k;
    u32 wanted = p.k;
    if (p.row_k != nullptr && p.row_k[row_index] < p.k) wanted = static_cast<u32>(max(p.row_k[row_index], 1ll));

    // Read, and send the maxima to everyone.
    cluster_arrive();
    u32 keys[4 * VECTORS];
    u32 largest[VECTORS];
    load_chunk(p, row, 0, rank, keys);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        largest[v] = __vmaxu2(__vmaxu2(keys[4 * v], keys[4 * v + 1]), __vmaxu2(keys[4 * v + 2], keys[4 * v + 3]));
    }
    for (int chunk = 1; chunk < p.chunks; chunk++) {
        load_chunk(p, row, chunk, rank, keys);
#pragma unroll
        for (int i = 0; i < 4 * VECTORS; i++) largest[i / 4] = __vmaxu2(largest[i / 4], keys[i]);
    }
    for (int i = thread; i < 2 * words + pieces; i += THREADS) chosen_bits[i] = 0;
    if (thread == 0) s.count = 0, s.pairs = 0;
    cluster_wait();
    u32 target = shared_address(maxima + rank * num_maxima + thread);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (!p.fine && v + 1 < VECTORS) {
            largest[v + 1] = __vmaxu2(largest[v], largest[v + 1]);
        } else {
            u32 key = max(largest[v] & 0xFFFF, largest[v] >> 16);
#pragma unroll
            for (int other = 0; other < CLUSTER; other++) {
                store_remote_half(remote(target + (p.fine ? 2 * THREADS * v : 0), other), 0x8000 | key >> 1);
            }
        }
    }
    cluster_sync();
    if (CLUSTER * num_maxima > 2048) {
        u32 bound = find_bound<true>(reinterpret_cast<const u32*>(maxima), wanted, s);
        if (thread == 0) s.bound = bound;
    } else if (thread < 32) {
        u32 bound = find_bound<false>(reinterpret_cast<const u32*>(maxima), wanted, s);
        if (thread == 0) s.bound = bound;
    }
    __syncthreads();

    // Candidates: pairs of values of which one is above the bound, then the exact values of those, to everyone.
    u32 bound = s.bound, below = (bound - 1) << 16 | (bound - 1);
    for (int chunk = 0; chunk < p.chunks; chunk++) {
        if (p.chunks > 1) load_chunk(p, row, chunk, rank, keys);
        u32 found = 0;
#pragma unroll
        for (int i = 0; i < 4 * VECTORS; i++) found |= __vmaxu2(keys[i], below) != below ? 1u << i : 0;
        if (found == 0) continue;
        u32 place = atomicAdd(&s.pairs, __popc(found));
        for (; found != 0 && place < p.list; found &= found - 1, place++) {
            int i = __ffs(found) - 1;
            pairs[place] = first_of(chunk * VECTORS + i / 4, rank) + i % 4 * 2;
        }
    }
    __syncthreads();
    bool overflow = s.pairs > p.list;
    u32 num_pairs = overflow ? 0 : s.pairs;
    u32 list_target = shared_address(lists + rank * p.list);
    for (u32 i = thread; i < num_pairs; i += THREADS) {
        int position = pairs[i];
        u32 bits[2] = {load_bits(row, position), position + 1 < p.width ? load_bits(row, position + 1) : 0xFF800000u};
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 key = ordered(bits[j]);
            if (key >> 16 < bound) continue;
            u32 place = atomicAdd(&s.count, 1u);
            if (place >= p.list) continue;
#pragma unroll
            for (int other = 0; other < CLUSTER; other++) {
                store_remote2(remote(list_target + 8 * place, other), key, position + j);
            }
        }
    }
    __syncthreads();
    if (thread < CLUSTER) {
        store_remote(remote(shared_address(&s.counts[rank]), thread), overflow ? p.list + 1 : s.count);
    }
    cluster_sync();

    u32 total = 0, most = 0;
#pragma unroll
    for (int other = 0; other < CLUSTER; other++) total += s.counts[other], most = max(most, s.counts[other]);
#if CLUSTER > 1
    if (most > p.list) {
        count_digits(p, row, rank, bound, wanted, reinterpret_cast<u32*>(lists), s);
        u32 threshold = s.threshold;
        FOR_EACH_VALUE({
            u32 local = position / PIECE / CLUSTER * (PIECE / 32) + position % PIECE / 32;
            if (inside && key >> SHIFT > threshold) atomicOr(&chosen_bits[local], 1u << position % 32);
            else if (inside && key >> SHIFT == threshold) atomicOr(&equal_bits[local], 1u << position % 32);
        })
        __syncthreads();
        for (int i = thread; i < p.chunks * PIECES; i += THREADS) {
            u32 count = 0;
            for (int w = i * (PIECE / 32); w < (i + 1) * (PIECE / 32); w++) {
                count += __popc(chosen_bits[w]) + (__popc(equal_bits[w]) << 16);
            }
            for (int other = 0; other < CLUSTER; other++) {
                store_remote(remote(shared_address(&before[i * CLUSTER + rank]), other), count);
            }
        }
        cluster_sync();
    } else
#endif
    {
        if (total <= wanted) {
            if (thread == 0) s.threshold = 0, s.equal_wanted = 0;
        } else if (most > (CLUSTER == 1 ? 1024 : 128)) {
            find_threshold<true>(lists, p.list, wanted, total, s);
        } else if (thread < 32) {
            find_threshold<false>(lists, p.list, wanted, total, s);
        }
        __syncthreads();
        u32 threshold = s.threshold;
        for (int other = 0; other < CLUSTER; other++) {
            for (u32 i = thread; i < s.counts[other]; i += THREADS) {
                uint2 candidate = lists[other * p.list + i];
                u32 key = candidate.x >> SHIFT, piece = candidate.y / PIECE;
                if (key < threshold) continue;
                atomicAdd(&before[piece], key > threshold ? 1u : 0x10000u);
                if (other != rank) continue;
                u32 local = piece / CLUSTER * (PIECE / 32) + candidate.y % PIECE / 32;
                atomicOr(key > threshold ? &chosen_bits[local] : &equal_bits[local], 1u << candidate.y % 32);
            }
        }
        __syncthreads();
    }

    // How many before each piece, then everyone's own positions in their places.
    u32 equal_wanted = s.equal_wanted;
    int pieces_each = (pieces + THREADS - 1) / THREADS;
    u64 own = 0;
    for (int i = thread * pieces_each; i < min((thread + 1) * pieces_each, pieces); i++) {
        own += static_cast<u64>(before[i] >> 16) << 32 | (before[i] & 0xFFFF);
    }
    u64 sum = inclusive_sum(own, s);
    u32 chosen = static_cast<u32>(sum - own), equal = static_cast<u32>(sum - own >> 32);
    if (thread == THREADS - 1) s.total = static_cast<u32>(sum) + min(static_cast<u32>(sum >> 32), equal_wanted);
    for (int i = thread * pieces_each; i < min((thread + 1) * pieces_each, pieces); i++) {
        u32 count = before[i];
        before[i] = min(equal, 0xF000u) << 16 | chosen;  // more equal ones than k are never wanted
        chosen += count & 0xFFFF, equal += count >> 16;
    }
    __syncthreads();
    for (int w = thread; w < words; w += THREADS) {
        u32 chosen_word = chosen_bits[w], equal_word = equal_bits[w];
        if ((chosen_word | equal_word) == 0) continue;
        int piece = w / (PIECE / 32) * CLUSTER + rank;
        u32 chosen = before[piece] & 0xFFFF, equal = before[piece] >> 16;
        for (int i = w & ~(PIECE / 32 - 1); i < w; i++) chosen += __popc(chosen_bits[i]), equal += __popc(equal_bits[i]);
        for (u32 bits = chosen_word | equal_word; bits != 0; bits &= bits - 1) {
            int bit = __ffs(bits) - 1, position = piece * PIECE + w % (PIECE / 32) * 32 + bit;
            if (chosen_word >> bit & 1) {
                out[chosen + min(equal, equal_wanted)] = position;
                chosen++;
            } else {
                if (equal < equal_wanted) out[chosen + equal] = position;
                equal++;
            }
        }
    }
    if (rank == CLUSTER - 1) {
        for (u32 i = s.total + thread; i < p.k; i += THREADS) out[i] = -1;
    }
}
