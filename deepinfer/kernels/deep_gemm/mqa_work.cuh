// Which tokens meet which keys in which block of mqa_logits.cu. Included behind its Params and macros.
#pragma once

#include "../deep_jit/hopper.cuh"

// Tokens from `token` on times key tiles [first, end); sequence: row of the block table; keys: that some token sees; all
// tokens see the keys [all_first, all_end).
struct Work {
    int token, first, end, sequence, keys, all_first, all_end;
};

// The pieces of work of this block, in order.
struct Walk {
#if PAGED
    int at, last, sequence = 0;
    const int* starts;
    DEVICE Walk(const Params& p, const int* starts) : starts(starts) {
        long long total = starts[p.tokens / QUERY_TOKENS];
        at = (int)(total * blockIdx.x / gridDim.x), last = (int)(total * (blockIdx.x + 1) / gridDim.x);
    }
    DEVICE bool next(const Params& p, Work& work) {
        if (at >= last) return false;
        while (starts[sequence + 1] <= at) sequence++;
        work.sequence = sequence, work.token = sequence * QUERY_TOKENS;
        work.first = at - starts[sequence], work.end = min(last, starts[sequence + 1]) - starts[sequence];
        at = starts[sequence] + work.end;
        return true;
    }
#else
    int at;
    DEVICE Walk(const Params&, const int*) : at(blockIdx.x) {}
    DEVICE bool next(const Params& p, Work& work) {
        const int tiles = (p.keys + KEYS - 1) / KEYS, chunks = (tiles + p.chunk - 1) / p.chunk;
        const int groups = (p.tokens + QUERY_TOKENS - 1) / QUERY_TOKENS;
        if (at >= groups * chunks) return false;
        const int chunk = at / groups;
        work.token = (at - chunk * groups) * QUERY_TOKENS;
        work.first = chunk * p.chunk, work.end = min(tiles, work.first + p.chunk), work.sequence = 0;
        at += gridDim.x;
        return true;
    }
#endif
};

// Narrows work to the tiles in which some token sees a key.
DEVICE Work seen_part(const Params& p, const Work& work) {
    int low = 0x7FFFFFFF, high = 0, all_first = 0, all_end = work.token + QUERY_TOKENS <= p.tokens ? p.keys : 0;
#pragma unroll
    for (int i = 0; i < QUERY_TOKENS; i++) {  // all loads at once; a token twice does no harm
        const int t = min(work.token + i, p.tokens - 1);
        const int start = PAGED ? 0 : __ldg(p.starts + t), end = __ldg(p.ends + t);
        if (start < end) low = min(low, start), high = max(high, end);
        all_first = max(all_first, start), all_end = min(all_end, end);
    }
    Work seen = work;
    seen.all_first = all_first, seen.all_end = all_end;
    if (!PAGED) high = min(high, p.keys);
    seen.keys = high;
    seen.first = max(work.first, min(low, high) / KEYS);
    seen.end = min(work.end, (high + KEYS - 1) / KEYS);
    if (seen.end < seen.first) seen.end = seen.first;
    return seen;
}

#if PAGED
// starts[i]: key tiles of the sequences before i.
DEVICE void count_tiles(const Params& p, int* starts) {
    const int sequences = p.tokens / QUERY_TOKENS;
    for (int i = threadIdx.x; i < sequences; i += 384) {
        int keys = 0;
        for (int t = 0; t < QUERY_TOKENS; t++) keys = max(keys, p.ends[i * QUERY_TOKENS + t]);
        starts[i + 1] = (keys + KEYS - 1) / KEYS;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int before = 0;
        if (threadIdx.x == 0) starts[0] = 0;
        for (int first = 0; first < sequences; first += 32) {
            const int i = first + threadIdx.x;
            int sum = i < sequences ? starts[i + 1] : 0;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int got = __shfl_up_sync(~0u, sum, step);
                if (threadIdx.x >= step) sum += got;
            }
            if (i < sequences) starts[i + 1] = before + sum;
            before += __shfl_sync(~0u, sum, 31);
        }
    }
    __syncthreads();
}
#endif
