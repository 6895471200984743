// The producer's side of the query: 64 heads of one token to shared memory, optionally normalised and rotated on the way.
#pragma once

#include "hopper.cuh"

#ifndef NORM_EPSILON
#define NORM_EPSILON 1e-20f
#endif

// A query that is changed on the way is worked on by the consumers, who have nothing else to do yet, for a block's first
// token, and by the producer for the others.
#define QUERY_IS_CHANGED (Q_NORM || ROPE)

struct Query {
    const u8* base;  // BF16 [tokens, heads, 512]
    long long token_stride, head_stride;  // bytes
};

// Of each token's position: cosines and sines of 32 pairs, FP32 [tokens, 32]; used with ROPE.
struct Angles {
    const float *cos, *sin;
};

// A box of a tensor of three dimensions, by one thread; its bytes are counted at `barrier`.
struct __align__(64) TensorMap {
    u8 bytes[128];
};
DEVICE void copy_box(u32 target, const TensorMap& map, int x, int y, int z, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(
            target),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(read_once_policy())
        : "memory");
}

// One arrival, and `bytes` of bulk copies to wait for beside it.
DEVICE void barrier_arrive_and_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

#define QUERY_ARRIVALS (QUERY_IS_CHANGED ? 128 : 1)

// As it is: 8 sub-tiles of [64 heads x 64 values], swizzled like the keys, by the copy engine.
DEVICE void copy_query(const TensorMap& map, int token, int head, u32 target, u32 ready) {
    if (threadIdx.x % 128) return;
    barrier_arrive_and_expect(ready, 65536);
#pragma unroll
    for (int t = 0; t < 8; t++) copy_box(target + t * 8192, map, t * 64, head, token, ready);
}

// To L2, while its token has to wait.
DEVICE void prefetch_query(const Query& query, int token, int head) {
    const u8* start = query.base + token * query.token_stride + (threadIdx.x % 128 % 8) * 128;
#pragma unroll
    for (int row = 0; row < 64; row += 16) prefetch_to_l2(start + (head + row + threadIdx.x % 128 / 8) * query.head_stride);
}

// Changed: 8 threads a row, THREADS of them together. Each announces its share to `ready`, unless that is 0.
template <int THREADS>
DEVICE void change_query(const Query& query, const Angles& angles, int token, int head, u32 target, u32 ready) {
    constexpr int ROWS = THREADS / 8;  // at once
    const int thread = threadIdx.x % THREADS, lane = thread % 8, row = thread / 8;
    const u8* source = query.base + token * query.token_stride + (head + row) * query.head_stride + lane * 16;
    target += row * 128 + ((lane ^ row % 8) << 4);
    float cos[4], sin[4];
#pragma unroll
    for (int i = 0; i < 4 && ROPE; i++) {
        cos[i] = __ldg(angles.cos + token * 32 + 4 * lane + i);
        sin[i] = __ldg(angles.sin + token * 32 + 4 * lane + i);
    }
#pragma unroll(THREADS / 128)
    for (int i = 0; i < 64 / ROWS; i++) {
        uint4 chunks[8];
#pragma unroll
        for (int t = 0; t < 8; t++) chunks[t] = __ldg((const uint4*)(source + i * ROWS * query.head_stride + t * 128));
        if (Q_NORM) {
            float squares = 0;
#pragma unroll
            for (int t = 0; t < 8; t++) {
                const u32 words[4] = {chunks[t].x, chunks[t].y, chunks[t].z, chunks[t].w};
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    squares = fmaf(low_bf16(words[w]), low_bf16(words[w]), squares);
                    squares = fmaf(high_bf16(words[w]), high_bf16(words[w]), squares);
                }
            }
#pragma unroll
            for (int mask = 1; mask < 8; mask *= 2) squares += __shfl_xor_sync(~0u, squares, mask);
            float factor = rsqrtf(squares * (1.0f / 512) + NORM_EPSILON);
#pragma unroll
            for (int t = 0; t < 8; t++) {
                chunks[t].x = pack_bf16(low_bf16(chunks[t].x) * factor, high_bf16(chunks[t].x) * factor);
                chunks[t].y = pack_bf16(low_bf16(chunks[t].y) * factor, high_bf16(chunks[t].y) * factor);
                chunks[t].z = pack_bf16(low_bf16(chunks[t].z) * factor, high_bf16(chunks[t].z) * factor);
                chunks[t].w = pack_bf16(low_bf16(chunks[t].w) * factor, high_bf16(chunks[t].w) * factor);
            }
        }
        u32 last[4] = {chunks[7].x, chunks[7].y, chunks[7].z, chunks[7].w};  // the rotated 64 dimensions
#pragma unroll
        for (int w = 0; w < 4; w++) {
            float even = low_bf16(last[w]), odd = high_bf16(last[w]);
            last[w] = pack_bf16(even * cos[w] - odd * sin[w], even * sin[w] + odd * cos[w]);
        }
        if (ROPE) chunks[7] = make_uint4(last[0], last[1], last[2], last[3]);
#pragma unroll
        for (int t = 0; t < 8; t++)
            store_shared(target + t * 8192 + i * ROWS * 128, chunks[t].x, chunks[t].y, chunks[t].z, chunks[t].w);
    }
    fence_to_matrix_units();
    if (ready) barrier_arrive(ready);
}
