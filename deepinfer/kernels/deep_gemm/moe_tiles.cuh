// Tiles of a grouped product: the tokens of each expert, at most MAX_TOKENS at a time, times blocks of its weight rows. The
// row blocks of the same tokens follow one another. Without tables there is one expert, with all tokens. Included behind Params; macros: MAX_TOKENS, TOKEN_STEP, THREADS (of a block).
#pragma once

#include "../deep_jit/hopper.cuh"

#define MAX_EXPERTS 1024
#define TABLES_BYTES ((3 * MAX_EXPERTS + 8) * 4)

// Rows first .. first + tokens of x; the first `skip` of them belong to the expert before: the copy engine wants scales from
// a multiple of 16 bytes on.
struct Tile {
    int expert, row_block, first, tokens, skip;
};

struct Tiles {
    const int* tables;  // in shared memory: begins, counts, then the tiles of tokens of the experts before each
    int total;

    // By all threads of the block. Each takes some neighbouring experts; `warp_sums` are 32 words of shared memory.
    DEVICE Tiles(const Params& p, int* tables, int* warp_sums) : tables(tables) {
        const int each = (p.experts + THREADS - 1) / THREADS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int *begins = tables, *counts = tables + MAX_EXPERTS, *starts = tables + 2 * MAX_EXPERTS;
        int own = 0;
        for (int i = 0; i < each; i++) {
            const int e = threadIdx.x * each + i;
            if (e >= p.experts) continue;
            const int begin = p.begins ? p.begins[e] : 0;
            const int count = min(p.counts ? p.counts[e] : p.tokens, p.tokens - begin);  // no rows behind the last of x
            begins[e] = begin, counts[e] = count > 0 && begin >= 0 ? count + begin % 4 : 0;
            own += (counts[e] + MAX_TOKENS - 1) / MAX_TOKENS;
        }
        int sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int got = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += got;
        }
        if (lane == 31) warp_sums[warp] = sum;
        __syncthreads();
        int before = sum - own;
        for (int w = 0; w < warp; w++) before += warp_sums[w];
        for (int i = 0; i < each; i++) {
            const int e = threadIdx.x * each + i;
            if (e >= p.experts) continue;  // with a break, warps would count as divided from here on
            starts[e] = before;
            before += (counts[e] + MAX_TOKENS - 1) / MAX_TOKENS;
            if (e == p.experts - 1) starts[p.experts] = before;
        }
        __syncthreads();
        total = starts[p.experts] * p.row_blocks;
    }

    DEVICE Tile of(const Params& p, int index) const {
        const int *begins = tables, *counts = tables + MAX_EXPERTS, *starts = tables + 2 * MAX_EXPERTS;
        Tile tile;
        const int at = index / p.row_blocks;
        tile.row_block = index - at * p.row_blocks;
        int low = 0, high = p.experts;  // starts[low] <= at < starts[high]
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (starts[middle] <= at) low = middle;
            else high = middle;
        }
        tile.expert = low;
        // An expert's tokens are divided evenly, in pieces of TOKEN_STEP.
        const int parts = starts[low + 1] - starts[low], count = counts[low];
        const int each = ((count + parts - 1) / parts + TOKEN_STEP - 1) / TOKEN_STEP * TOKEN_STEP;
        const int first = (at - starts[low]) * each;
        tile.skip = first == 0 ? begins[low] % 4 : 0;
        tile.first = begins[low] / 4 * 4 + first;
        tile.tokens = min(each, count - first);
        return tile;
    }
};
