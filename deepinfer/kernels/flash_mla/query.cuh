// The query: 64 heads of one token to shared memory by the copy engine, optionally normalised and rotated there.
//
// A norm without weights is a factor of a row's logits, so that only the 64 rotated dimensions are ever written again.
#pragma once

#include "instructions.cuh"

#ifndef NORM_EPSILON
#define NORM_EPSILON 1e-20f
#endif

#define QUERY_IS_CHANGED (Q_NORM || ROPE)

struct Query {
    const u8* base;  // BF16 [tokens, heads, 512]
    long long token_stride, head_stride;  // bytes
};

// Of each token's position: cosines and sines of 32 pairs, FP32 [tokens, 32]; used with ROPE.
struct Angles {
    const float *cos, *sin;
};

// 8 sub-tiles of [64 heads x 64 values], swizzled like the keys.
DEVICE void copy_query(const TensorMap& map, int item, u32 target, u32 ready) {
    if (threadIdx.x % 128) return;
    barrier_expect(ready, 65536);
    const int token = item / BLOCKS_A_TOKEN, head = item % BLOCKS_A_TOKEN * BLOCK_HEADS;
#pragma unroll
    for (int t = 0; t < 8; t++) copy_box(target + t * SUB_TILE_BYTES, map, t * 64, head, token, ready);
}

// To L2, while its token has to wait.
DEVICE void prefetch_query(const Query& query, int item) {
    const int token = item / BLOCKS_A_TOKEN, head = item % BLOCKS_A_TOKEN * BLOCK_HEADS;
    const u8* start = query.base + token * query.token_stride + (threadIdx.x % 128 % 8) * 128;
#pragma unroll
    for (int row = 0; row < 64; row += 16) prefetch_to_l2(start + (head + row + threadIdx.x % 128 / 8) * query.head_stride);
}

// The factor of each row's logits, to `factors` [64], and the rotation of the last sub-tile: 8 threads a row, 32 rows at
// once. The caller synchronises.
DEVICE void change_query(const Angles& angles, int token, u8* query, float* factors) {
    const int thread = threadIdx.x % 256, lane = thread % 8;
    float cos[4], sin[4];
#pragma unroll
    for (int i = 0; i < 4 && ROPE; i++) {
        cos[i] = __ldg(angles.cos + token * 32 + 4 * lane + i);
        sin[i] = __ldg(angles.sin + token * 32 + 4 * lane + i);
    }
#pragma unroll 1
    for (int row = thread / 8; row < 64; row += 32) {
        u8* chunk = query + row * 128 + ((lane ^ row % 8) << 4);
        float squares = 0;
        u32 words[4];
#pragma unroll
        for (int t = Q_NORM ? 0 : 7; t < 8; t++) {
            const uint4 four = *(const uint4*)(chunk + t * SUB_TILE_BYTES);
            words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
#pragma unroll
            for (int w = 0; w < 4; w++) {
                squares = fmaf(low_bf16(words[w]), low_bf16(words[w]), squares);
                squares = fmaf(high_bf16(words[w]), high_bf16(words[w]), squares);
            }
        }
#pragma unroll
        for (int mask = 1; mask < 8 && Q_NORM; mask *= 2) squares += __shfl_xor_sync(~0u, squares, mask);
        if (lane == 0) factors[row] = Q_NORM ? rsqrtf(squares * (1.0f / 512) + NORM_EPSILON) : 1.0f;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const float even = low_bf16(words[w]), odd = high_bf16(words[w]);
            words[w] = pack_bf16(even * cos[w] - odd * sin[w], even * sin[w] + odd * cos[w]);
        }
        if (ROPE) *(uint4*)(chunk + 7 * SUB_TILE_BYTES) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    fence_to_copies();
}
