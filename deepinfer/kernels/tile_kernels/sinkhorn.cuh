// mHC's coefficients of a token out of its normed products with `fn`, by a warp.
#pragma once

#define HC 4
#define MIXES (HC * (2 + HC))
#define ALL 0xFFFFFFFFu

struct Coefficients {
    const float* scale;  // [3]
    const float* base;   // [MIXES]
    float* pre;          // of the token
    float* post;
    float* comb;
};

// product: that of mix `lane`, over the root mean square of the streams.
DEVICE void coefficients(const Coefficients& to, float product, int iterations, float hc_eps) {
    int lane = threadIdx.x % 32;
    int kind = lane < HC ? 0 : lane < 2 * HC ? 1 : 2;
    float u = product * to.scale[kind] + to.base[min(lane, MIXES - 1)];
    float gate = 1.0f / (1.0f + fast_exp(-u));
    if (kind == 0) to.pre[lane] = gate + hc_eps;
    if (kind == 1) to.post[lane - HC] = 2.0f * gate;
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
        for (int j = 0; j < HC; j++) c[i][j] = c[i][j] * inverse + hc_eps;
    }
    for (int iteration = 0; iteration < iterations; iteration++) {
        if (iteration > 0) {
#pragma unroll
            for (int i = 0; i < HC; i++) {
                float inverse = fast_reciprocal((c[i][0] + c[i][1]) + (c[i][2] + c[i][3]) + hc_eps);
#pragma unroll
                for (int j = 0; j < HC; j++) c[i][j] *= inverse;
            }
        }
#pragma unroll
        for (int j = 0; j < HC; j++) {
            float inverse = fast_reciprocal((c[0][j] + c[1][j]) + (c[2][j] + c[3][j]) + hc_eps);
#pragma unroll
            for (int i = 0; i < HC; i++) c[i][j] *= inverse;
        }
    }
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < HC * HC; i++) to.comb[i] = c[i / HC][i % HC];
    }
}

