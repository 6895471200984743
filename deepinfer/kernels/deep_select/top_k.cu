// Exact top-k of rows of floats, by one cluster of CLUSTER blocks a row.
//
// A row is read once, from memory at full speed, and stays in registers as the leading 16 bits of its values. As soon as
// a block has read its part it finds a bound that k / CLUSTER of its threads' largest values reach; the least of the
// blocks' bounds is a lower bound of the k-th largest value, and a close one. The few values above it (the candidates) go
// to one block of the cluster, the leader. It finds
// the last one that is chosen by a histogram and a comparison of those in one bin, marks the chosen ones in a bitmap of
// the row and writes their positions in ascending order. Of equal values the first are chosen, -inf and NaN never.
// Pieces of 256 values are dealt to the blocks in turn, so that the scores of a short context, or a cluster of large
// ones, do not all fall to one of them.
//
// If a block has more candidates than its list holds (many equal values), all blocks count digits of all values instead
// (all_values.cuh). Any input gives the exact result.
//
// Macros: BF16 (values are BF16, else float32), CLUSTER, THREADS.
#include "cluster.cuh"

#define WARPS (THREADS / 32)
#define VECTORS 8  // groups of 8 values that a thread takes of a chunk
#define PIECE 256  // values of a warp's 32 groups
#define PIECES (VECTORS * WARPS)  // of a block and chunk
#define WINDOW (CLUSTER * PIECES * PIECE)  // values of a chunk of the row
#define OWN_WORDS (WINDOW / 32 / THREADS)    // words of a thread in the bitmap of a chunk,
#define WORDS (THREADS * (OWN_WORDS + 1))    // with one left free, so that threads use different banks
#define BINS 1024
#define CLOSE 256  // candidates in the threshold's bin that are compared with each other
#define LOWEST 0x007Fu  // leading ordered bits of -inf
#define SHIFT (BF16 ? 16 : 0)  // bits that BF16 values do not have

struct Params {
    const void* scores;
    int* out;                // [rows, k]
    const long long* row_k;  // how many of each row, or null: k
    const int* ends;         // where each row ends, or null: width
    long long row_stride;    // in values
    int width;
    int k;
    int vector_end;  // values below may be read 16 bytes at a time
    int chunks;      // of CLUSTER * 16384 values
    int list;        // candidates that a block may have
    int fine;        // maxima of each thread's columns (values j of its groups of 8) instead of each thread
};

struct Shared {
    u64 warp_sums[WARPS];
    u32 counts[CLUSTER];  // candidates of each block
    u32 count;            // of this block
    u32 overflow;         // of any block's list
    u32 searcher;         // warp that finds this block's bound
    u32 bounds[CLUSTER];  // of each block; times 65536 its largest value: leading ordered bits
    u32 digit, above, inside, found;
    u32 close;
    u32 last_key, last_position;  // of the chosen ones
};

#include "selection.cuh"
#include "all_values.cuh"

// pairs[4 v + i]: upper 16 bits of values 2 i and 2 i + 1 of vector v, those of -inf past the row's end.
DEVICE void load_chunk(
    const u8* row, int width, int vector_end, int chunk, u32 rank, u32 (&pairs)[4 * VECTORS]
) {
    const u32 hidden = BF16 ? 0xFF80FF80u : 0xFF800000u;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        int first = first_of(chunk * VECTORS + v, rank);
        uint4 value = {hidden, hidden, hidden, hidden};
#if BF16
        if (first < vector_end) value = *reinterpret_cast<const uint4*>(row + first * 2ll);
        pairs[4 * v] = value.x, pairs[4 * v + 1] = value.y, pairs[4 * v + 2] = value.z, pairs[4 * v + 3] = value.w;
#else
        uint4 second = value;
        if (first < vector_end) {
            value = reinterpret_cast<const uint4*>(row + first * 4ll)[0];
            second = reinterpret_cast<const uint4*>(row + first * 4ll)[1];
        }
        pairs[4 * v] = upper_halves(plain_float(value.x), plain_float(value.y));
        pairs[4 * v + 1] = upper_halves(plain_float(value.z), plain_float(value.w));
        pairs[4 * v + 2] = upper_halves(plain_float(second.x), plain_float(second.y));
        pairs[4 * v + 3] = upper_halves(plain_float(second.z), plain_float(second.w));
        if (v == 3) keep_order();
#endif
    }
    if (vector_end >= width) return;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {  // unaligned rows, and the last values of others
        int first = first_of(chunk * VECTORS + v, rank);
        if (first < vector_end || first >= width) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 bits[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int at = first + 2 * i + j;
                bits[j] = at < width ? plain_float(load_bits(row, at)) : 0xFF800000u;
            }
            pairs[4 * v + i] = upper_halves(bits[0], bits[1]);
        }
    }
}

// A maximum as `find_bound` takes it.
DEVICE u32 half_key(u32 upper_bits) { return 0x8000 | ordered(upper_bits) >> 17; }
DEVICE u32 half_keys(u32 pair) { return half_key(pair << 16) | half_key(pair & 0xFFFF0000u) << 16; }

// How many of the maxima reach `least`, a key / 2. Maxima are half keys, two a word, 256 for each of `vectors`; by a warp.
DEVICE u32 count_reaching(const uint4* words, int vectors, u32 least) {
    u32 twice = least << 16 | least, count = 0;
    for (int i = 0; i < vectors; i++) {
        uint4 word = words[i * 32 + threadIdx.x % 32];
        count += (word.x - twice >> 15 & 0x00010001) + (word.y - twice >> 15 & 0x00010001);
        count += (word.z - twice >> 15 & 0x00010001) + (word.w - twice >> 15 & 0x00010001);
    }
    return __reduce_add_sync(0xFFFFFFFFu, (count & 0xFFFF) + (count >> 16));
}

// A bound that at least `wanted` of the maxima reach, and not many more if they differ; times 65536 the largest's key.
DEVICE u32 find_bound(const uint4* words, int vectors, u32 wanted) {
    u32 least = 0xFFFFFFFFu, most = 0;
    for (int i = 0; i < vectors; i++) {
        uint4 word = words[i * 32 + threadIdx.x % 32];
        least = __vminu2(__vminu2(least, word.x), __vminu2(word.y, __vminu2(word.z, word.w)));
        most = __vmaxu2(__vmaxu2(most, word.x), __vmaxu2(word.y, __vmaxu2(word.z, word.w)));
    }
    least = __reduce_min_sync(0xFFFFFFFFu, min(least & 0xFFFF, least >> 16));
    most = __reduce_max_sync(0xFFFFFFFFu, max(most & 0xFFFF, most >> 16));
    u32 low = max(least & 0x7FFF, LOWEST / 2 + 1), high = (most & 0x7FFF) + 1;
    most = (most & 0x7FFF) << 17 | 0x10000;
    if (count_reaching(words, vectors, low) < wanted) return most | LOWEST + 1;  // all that are above -inf
    while (high - low > 1) {  // enough maxima reach low, too few reach high
        u32 middle = low + (high - low) / 2, count = count_reaching(words, vectors, middle);
        if (count < wanted) {
            high = middle;
        } else {
            low = middle;
            if (count <= wanted + wanted / 8) break;
        }
    }
    return most | low << 1;
}

// Where this lane's `own` candidates go in its block's list: one addition a warp, as lanes mostly have 3 or fewer.
DEVICE u32 place_of_own(u32 own, Shared& s) {
    int lane = threadIdx.x % 32;
    u32 ones = __ballot_sync(0xFFFFFFFFu, own & 1), twos = __ballot_sync(0xFFFFFFFFu, own & 2);
    u32 many = __ballot_sync(0xFFFFFFFFu, own > 3), below = (1u << lane) - 1;
    if ((ones | twos | many) == 0) return 0;
    if (many != 0) return own == 0 ? 0 : atomicAdd(&s.count, own);
    u32 first = 0;
    if (lane == 0) first = atomicAdd(&s.count, __popc(ones) + 2 * __popc(twos));
    return __shfl_sync(0xFFFFFFFFu, first, 0) + __popc(ones & below) + 2 * __popc(twos & below);
}

// BODY sees every candidate (key, position) `one`, in the leader: a warp takes the list of a block. The first of each
// lane are in registers; their key is 0 where there is none.
#define HELD 4
#define FOR_EACH_CANDIDATE(BODY)                                                      \
    {                                                                                 \
        _Pragma("unroll") for (int held_index = 0; held_index < HELD; held_index++) { \
            uint2 one = held[held_index];                                             \
            if (one.x != 0) { BODY }                                                  \
        }                                                                             \
        for (u32 i = own.first + HELD * own.step; i < own.count; i += own.step) {     \
            uint2 one = own.list[i];                                                  \
            BODY                                                                      \
        }                                                                             \
    }

struct Own {
    const uint2* list;
    u32 first, step, count;
};

// The bins that candidates are counted in.
struct Bins {
    u32 base;
    int shift;

    DEVICE Bins(u32 bound, u32 most) {
        base = bound << (16 - SHIFT);
        shift = max(22 - __clz(((most - bound + 1) << (16 - SHIFT)) - 1), 0);
    }
    DEVICE u32 of(u32 key) const { return (key >> SHIFT) - base >> shift; }
};

// s.last_key and s.last_position of `wanted` candidates in the order of their keys, equal ones in that of positions.
DEVICE void find_last(
    const Params& p, const uint2 (&held)[HELD], const Own& own, u32 wanted, const Bins& bins, const u32* counted,
    uint2* close, Shared& s
) {
    find_bin<1, BINS / THREADS>(counted, wanted, s);
    u32 digit = s.digit, above = s.above;
    if (s.inside <= CLOSE) {
        uint2 none = {0, 0};
        if (threadIdx.x < 3) close[s.inside + threadIdx.x] = none;  // read four at a time
        FOR_EACH_CANDIDATE(if (bins.of(one.x) == digit) close[atomicAdd(&s.close, 1u)] = one;)
        __syncthreads();
        if (threadIdx.x < s.inside) {
            uint2 mine = close[threadIdx.x];
            u32 ahead = above;
            for (u32 i = 0; i < s.inside; i += 4) {
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    uint2 other = close[i + j];
                    ahead += other.x > mine.x || (other.x == mine.x && other.y <= mine.y);
                }
            }
            if (ahead == wanted) s.last_key = mine.x, s.last_position = mine.y;
        }
        __syncthreads();
        return;
    }
    // Many close ones: bisect on keys, then on the positions of equal ones.
    u32 low = bins.base << SHIFT, high = 0xFFFFFFFFu;
    while (low < high) {
        u32 middle = low + (high - low) / 2 + 1, count = 0;
        FOR_EACH_CANDIDATE(count += one.x >= middle;)
        count = block_sum(__reduce_add_sync(0xFFFFFFFFu, count), s);
        if (count >= wanted) low = middle;
        else high = middle - 1;
    }
    u32 key = low, count = 0;
    FOR_EACH_CANDIDATE(count += one.x > key;)
    u32 equal_wanted = wanted - block_sum(__reduce_add_sync(0xFFFFFFFFu, count), s);
    low = 0, high = p.width - 1;
    while (low < high) {
        u32 middle = low + (high - low) / 2;
        count = 0;
        FOR_EACH_CANDIDATE(count += one.x == key && one.y <= middle;)
        count = block_sum(__reduce_add_sync(0xFFFFFFFFu, count), s);
        if (count >= equal_wanted) high = middle;
        else low = middle + 1;
    }
    if (threadIdx.x == 0) s.last_key = key, s.last_position = low;
    __syncthreads();
}

KERNEL(THREADS, 1024 / THREADS) CLUSTER_DIMS top_k(const Params p) {
    SHARED_MEMORY(memory);
    Shared& s = *reinterpret_cast<Shared*>(memory);
    uint2* lists = reinterpret_cast<uint2*>(memory + (sizeof(Shared) + 15) / 16 * 16);  // (key, position) by block
    u32* counted = reinterpret_cast<u32*>(lists + CLUSTER * p.list);  // candidates by bin, in the leader
    u16* before = reinterpret_cast<u16*>(counted);  // once the last one is known: chosen before each two words
    u32* positions = counted + BINS;  // of this block's candidates
    u16* maxima = reinterpret_cast<u16*>(positions);  // until the bound is known, of threads and
    uint4* of_columns = reinterpret_cast<uint4*>(lists);  // of their columns
    uint2* close = reinterpret_cast<uint2*>(positions);  // once they are sent
    u32* bitmap = positions + max(p.list, 2 * (CLOSE + 4));
    int thread = threadIdx.x;
    u32 rank = blockIdx.x % CLUSTER, leader = blockIdx.y % CLUSTER;
    long long row_index = blockIdx.y;
    const u8* row = static_cast<const u8*>(p.scores) + row_index * p.row_stride * (BF16 ? 2 : 4);
    int* out = p.out + row_index * p.k;
    u32 wanted = p.k;
    follow_launch_before();
    if (p.row_k != nullptr && p.row_k[row_index] < p.k) wanted = static_cast<u32>(max(p.row_k[row_index], 1ll));
    int width = p.width, vector_end = p.vector_end;
    if (p.ends != nullptr) {
        width = max(min(p.ends[row_index], width), 0);
        vector_end = min(vector_end, width / 8 * 8);
    }

    // Read, and send the maxima to everyone.
    cluster_arrive();
    u32 pairs[4 * VECTORS];
    u32 columns[4];
    load_chunk(row, width, vector_end, 0, rank, pairs);
    if (thread == 0) s.count = 0, s.overflow = 0, s.close = 0, s.searcher = hardware_place() % WARPS;
    if (rank == leader) {
        for (int i = thread; i < WORDS; i += THREADS) bitmap[i] = 0;
        for (int i = thread; i < BINS; i += THREADS) counted[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < 4 * VECTORS; i++) columns[i % 4] = i < 4 ? pairs[i] : larger_bf16(columns[i % 4], pairs[i]);
    for (int chunk = 1; chunk < p.chunks; chunk++) {
        load_chunk(row, width, vector_end, chunk, rank, pairs);
#pragma unroll
        for (int i = 0; i < 4 * VECTORS; i++) columns[i % 4] = larger_bf16(columns[i % 4], pairs[i]);
    }
    u32 largest = larger_bf16(larger_bf16(columns[0], columns[1]), larger_bf16(columns[2], columns[3]));
    maxima[thread] = max(half_key(largest << 16), half_key(largest & 0xFFFF0000u));
    if (p.fine) {
#pragma unroll
        for (int i = 0; i < 4; i++) columns[i] = half_keys(columns[i]);
    }
    of_columns[thread] = {columns[0], columns[1], columns[2], columns[3]};
    __syncthreads();
    cluster_wait();
    // One warp of each block, not the same in blocks that share a multiprocessor: those would wait for one scheduler.
    if (thread / 32 == s.searcher) {
        u32 share = (wanted + CLUSTER - 1) / CLUSTER;
        const uint4* words = reinterpret_cast<const uint4*>(maxima);
        int vectors = THREADS / 256;
        // Many wanted or a short context: those of threads leave too many candidates.
        if (p.fine || count_reaching(words, vectors, LOWEST / 2 + 1) < 2 * share) {
            u32* word = reinterpret_cast<u32*>(of_columns) + thread % 32;
            for (int i = 0; i < THREADS * 4 && !p.fine; i += 32) word[i] = half_keys(word[i]);
            __syncwarp();
            words = of_columns, vectors = THREADS / 32;
        }
        u32 own = find_bound(words, vectors, share);
        if (thread % 32 < CLUSTER) store_remote(remote(shared_address(&s.bounds[rank]), thread % 32), own);
    }
    cluster_sync();

    // Positions of the candidates, then the candidates to the leader.
    u32 bound = 0xFFFF, most = 0;
#pragma unroll
    for (int other = 0; other < CLUSTER; other++) {
        bound = min(bound, s.bounds[other] & 0xFFFF);
        most = max(most, s.bounds[other] >> 16);
    }
    const Bins bins(bound, most);
    u32 bound_value = bits_of(bound << 16) >> 16;
    bound_value |= bound_value << 16;
    for (int chunk = 0; chunk < p.chunks; chunk++) {
        if (p.chunks > 1) load_chunk(row, width, vector_end, chunk, rank, pairs);
        u32 found[2] = {0, 0};  // a bit for the even values, 16 higher for the odd ones
#pragma unroll
        for (int i = 0; i < 4 * VECTORS; i++) {
            found[i / 16] |= reaches_bf16(pairs[i], bound_value) & (0x00010001u << i % 16);
        }
        u32 place = place_of_own(__popc(found[0]) + __popc(found[1]), s);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            for (u32 bits = found[half]; bits != 0 && place < p.list; bits &= bits - 1, place++) {
                int bit = __ffs(bits) - 1, i = 16 * half + bit % 16;
                positions[place] = first_of(chunk * VECTORS + i / 4, rank) + i % 4 * 2 + bit / 16;
            }
        }
    }
    __syncthreads();
    u32 count = s.count;
    if (count > p.list) {
        if (thread < CLUSTER) store_remote(remote(shared_address(&s.overflow), thread), 1);
    } else {
        u32 list_target = remote(shared_address(lists + rank * p.list), leader);
        u32 bin_target = remote(shared_address(counted), leader);
        for (u32 i = thread; i < count; i += THREADS) {
            u32 key = ordered(load_bits(row, positions[i]));
            store_remote2(list_target + 8 * i, key, positions[i]);
            add_remote(bin_target + 4 * bins.of(key), 1);
        }
        if (thread == 0) store_remote(remote(shared_address(&s.counts[rank]), leader), count);
    }
    cluster_sync();
    if (s.overflow) {
        select_all_values(p, row, width, out, rank, bound, wanted, reinterpret_cast<u32*>(lists), bitmap, s);
        return;
    }
    if (rank != leader) return;

    u32 total = 0;
#pragma unroll
    for (int other = 0; other < CLUSTER; other++) total += s.counts[other];
    const int each = THREADS / CLUSTER;  // threads of a list
    int list = thread / each;
    Own own = {lists + list * p.list, static_cast<u32>(thread % each), each, s.counts[list]};
    uint2 held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        held[i].x = held[i].y = 0;
        if (own.first + i * own.step < own.count) held[i] = own.list[own.first + i * own.step];
    }
    u32 last_key = 1, last_position = 0;  // all of them
    if (total > wanted) {
        find_last(p, held, own, wanted, bins, counted, close, s);
        last_key = s.last_key, last_position = s.last_position;
        total = wanted;
    }
    u32 written = 0;
    for (int chunk = 0; chunk < p.chunks; chunk++) {
        if (chunk > 0) {
            __syncthreads();
            for (int i = thread; i < WORDS; i += THREADS) bitmap[i] = 0;
            __syncthreads();
        }
        FOR_EACH_CANDIDATE({
            u32 at = one.y - chunk * WINDOW;
            if (at < WINDOW && (one.x > last_key || (one.x == last_key && one.y <= last_position))) {
                atomicOr(&bitmap[at / 32 + at / 32 / OWN_WORDS], 1u << at % 32);
            }
        })
        __syncthreads();
        const u32* words = bitmap + thread * (OWN_WORDS + 1);
        u32 chosen = 0, sums[OWN_WORDS / 2];
#pragma unroll
        for (int i = 0; i < OWN_WORDS / 2; i++) {
            sums[i] = chosen;
            chosen += __popc(words[2 * i]) + __popc(words[2 * i + 1]);
        }
        u32 place = written + inclusive_sum(chosen, s) - chosen;
#pragma unroll
        for (int i = 0; i < OWN_WORDS / 2; i++) before[thread * (OWN_WORDS / 2) + i] = place + sums[i];
        if (thread == THREADS - 1) s.count = place + chosen;
        __syncthreads();
        written = s.count;
        FOR_EACH_CANDIDATE({
            u32 at = one.y - chunk * WINDOW;
            if (at < WINDOW && (one.x > last_key || (one.x == last_key && one.y <= last_position))) {
                u32 word = at / 32;
                const u32* bits = bitmap + word + word / OWN_WORDS;
                u32 place_of = before[word / 2] + __popc(bits[0] & (1u << at % 32) - 1);
                if (word % 2 != 0) place_of += __popc(bits[-1]);
                out[place_of] = one.y;
            }
        })
    }
    for (u32 i = total + thread; i < p.k; i += THREADS) out[i] = -1;
}
