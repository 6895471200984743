// What the mHC kernels share: arguments, BF16 numbers, and the coefficients of a token.
#pragma once

#include "../deep_select/cluster.cuh"

#define HC 4
#define MIXES (HC * (2 + HC))
#define ALL 0xFFFFFFFFu

struct MixParams {
    const u16* h;  // [rows, HC, DIM]
    const u16* y;  // [rows, DIM], or null: h is mixed in as it is
    const float* post;
    const float* comb;
    const float* p_prev;
    const float* fn;  // [MIXES, HC * DIM], or what `arrange` made of it
    const float* scale;
    const float* base;
    const u16* norm_weight;
    u16* after;  // the post-mixed streams
    u16* x;
    float* new_pre;
    float* new_post;
    float* new_comb;
    int rows;
    int iterations;
    float hc_eps;
    float rms_eps;
};

DEVICE void widen(uint2 packed, float (&value)[4]) {
    value[0] = __uint_as_float(packed.x << 16), value[1] = __uint_as_float(packed.x & 0xFFFF0000u);
    value[2] = __uint_as_float(packed.y << 16), value[3] = __uint_as_float(packed.y & 0xFFFF0000u);
}

DEVICE uint2 narrow(const float (&value)[4]) {
    uint2 packed = {pack_bf16(value[0], value[1]), pack_bf16(value[2], value[3])};
    return packed;
}

DEVICE float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(ALL, value, step);
    return value;
}

// Coefficients of a token by a warp: `product` with row min(lane, MIXES - 1) of fn, `squares` of all streams.
DEVICE void coefficients(const MixParams& p, float product, float squares, long long row) {
    int lane = threadIdx.x % 32;
    int kind = lane < HC ? 0 : lane < 2 * HC ? 1 : 2;
    float u = product * rsqrtf(squares / (HC * DIM) + p.rms_eps) * p.scale[kind] + p.base[min(lane, MIXES - 1)];
    float gate = 1.0f / (1.0f + fast_exp(-u));
    if (kind == 0) p.new_pre[row * HC + lane] = gate + p.hc_eps;
    if (kind == 1) p.new_post[row * HC + lane - HC] = 2.0f * gate;
    float c[HC][HC];
#pragma unroll
    for (int i = 0; i < HC * HC; i++) c[i / HC][i % HC] = __shfl_sync(ALL, u, 2 * HC + i);
#pragma unroll
    for (int i = 0; i < HC; i++) {
        float most = fmaxf(fmaxf(c[i][0], c[i][1]), fmaxf(c[i][2], c[i][3]));
#pragma unroll
        for (int j = 0; j < HC; j++) c[i][j] = fast_exp(c[i][j] - most);
        float inverse = 1.0f / ((c[i][0] + c[i][1]) + (c[i][2] + c[i][3]));
#pragma unroll
        for (int j = 0; j < HC; j++) c[i][j] = c[i][j] * inverse + p.hc_eps;
    }
    for (int iteration = 0; iteration < p.iterations; iteration++) {
        if (iteration > 0) {
#pragma unroll
            for (int i = 0; i < HC; i++) {
                float inverse = fast_reciprocal((c[i][0] + c[i][1]) + (c[i][2] + c[i][3]) + p.hc_eps);
#pragma unroll
                for (int j = 0; j < HC; j++) c[i][j] *= inverse;
            }
        }
#pragma unroll
        for (int j = 0; j < HC; j++) {
            float inverse = fast_reciprocal((c[0][j] + c[1][j]) + (c[2][j] + c[3][j]) + p.hc_eps);
#pragma unroll
            for (int i = 0; i < HC; i++) c[i][j] *= inverse;
        }
    }
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < HC * HC; i++) p.new_comb[row * HC * HC + i] = c[i / HC][i % HC];
    }
}
