// Selection for rows with too many candidates: a radix select of all values, whose histograms are added up across the
// cluster. Every block then writes its own positions.
#pragma once

// One more at bins[bin] for every lane that is `counted`; lanes of the same bin together.
DEVICE void count_bin(u32* bins, u32 bin, bool counted) {
    u32 same = __match_any_sync(0xFFFFFFFFu, counted ? bin : ~0u);
    if (counted && (same & (1u << threadIdx.x % 32) - 1) == 0) atomicAdd(bins + bin, __popc(same));
}

// BODY sees `key` and `position` of every value of this block, and whether it is `inside`: above the bound.
#define FOR_EACH_VALUE(BODY)                                                     \
    for (int vector = 0; vector < p.chunks * VECTORS; vector++) {                \
        int first = first_of(vector, rank);                                      \
        for (int i = 0; i < 8; i++) {                                            \
            int position = first + i;                                            \
            u32 key = position < width ? ordered(load_bits(row, position)) : 0; \
            bool inside = key >> 16 >= bound;                                    \
            BODY                                                                 \
        }                                                                        \
    }

// memory: 24 KiB and 4 bytes a piece of the row, bitmaps: 64 bytes a piece of the block.
DEVICE void select_all_values(
    const Params& p, const u8* row, int width, int* out, u32 rank, u32 bound, u32 wanted, u32* memory, u32* bitmaps, Shared& s
) {
    const int size = 2048;  // of a histogram
    int thread = threadIdx.x, words = p.chunks * PIECES * (PIECE / 32), pieces = p.chunks * PIECES * CLUSTER;
    u32 *second = memory + size, *third = second + size;
    u32 *chosen_bits = bitmaps, *equal_bits = bitmaps + words;
    for (int i = thread; i < 3 * size; i += THREADS) memory[i] = 0;
    for (int i = thread; i < 2 * words; i += THREADS) bitmaps[i] = 0;
    __syncthreads();
    FOR_EACH_VALUE(count_bin(memory, key >> 21, inside);)
    cluster_sync();
    find_bin<CLUSTER, size / THREADS>(memory, wanted, s);
    u32 threshold = s.digit, equal_wanted = wanted - s.above;
    bool all = !s.found;  // fewer than wanted values above -inf
    FOR_EACH_VALUE(count_bin(second, key >> 10 & 2047, inside && key >> 21 == threshold);)
    cluster_sync();
    if (!all) {
        find_bin<CLUSTER, size / THREADS>(second, equal_wanted, s);
        threshold = threshold << 11 | s.digit;
        equal_wanted -= s.above;
    }
    FOR_EACH_VALUE(count_bin(third, key & 1023, inside && key >> 10 == threshold);)
    cluster_sync();
    if (!all) {
        find_bin<CLUSTER, size / THREADS>(third, equal_wanted, s);
        threshold = threshold << 10 | s.digit;
        equal_wanted -= s.above;
    }
    if (all) threshold = 0, equal_wanted = 0;
    cluster_sync();  // nobody reads the histograms any more
    FOR_EACH_VALUE({
        u32 local = position / PIECE / CLUSTER * (PIECE / 32) + position % PIECE / 32;
        if (inside && key > threshold) atomicOr(&chosen_bits[local], 1u << position % 32);
        else if (inside && key == threshold) atomicOr(&equal_bits[local], 1u << position % 32);
    })
    __syncthreads();
    // How many each piece of the row has: chosen and, times 65536, equal to the threshold.
    u32* before = memory;
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
    int each = (pieces + THREADS - 1) / THREADS, begin = min(thread * each, pieces), end = min(begin + each, pieces);
    u64 own = 0;
    for (int i = begin; i < end; i++) own += static_cast<u64>(before[i] >> 16) << 32 | (before[i] & 0xFFFF);
    u64 sum = inclusive_sum(own, s);
    u32 chosen = static_cast<u32>(sum - own), equal = static_cast<u32>(sum - own >> 32);
    if (thread == THREADS - 1) s.count = static_cast<u32>(sum) + min(static_cast<u32>(sum >> 32), equal_wanted);
    for (int i = begin; i < end; i++) {
        u32 count = before[i];
        before[i] = min(equal, 0xF000u) << 16 | chosen;  // more equal ones than k are never wanted
        chosen += count & 0xFFFF, equal += count >> 16;
    }
    __syncthreads();
    for (int w = thread; w < words; w += THREADS) {
        u32 chosen_word = chosen_bits[w], equal_word = equal_bits[w];
        if ((chosen_word | equal_word) == 0) continue;
        int piece = w / (PIECE / 32) * CLUSTER + rank;
        chosen = before[piece] & 0xFFFF, equal = before[piece] >> 16;
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
        for (u32 i = s.count + thread; i < p.k; i += THREADS) out[i] = -1;
    }
}
