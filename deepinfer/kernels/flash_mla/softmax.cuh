// The softmax of a consumer warpgroup: running maxima and sums of rows, probabilities as operands of the next product.
#pragma once

#include "layout.cuh"

DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// What a thread of a consumer group keeps of two rows: r and r + 8. Logits are in units of log 2.
struct Softmax {
    float maximum[2], sum[2];

    // A row's maximum follows a new one only if that is LAZY above it: numerators up to 2^LAZY are as good, and most
    // tiles then need no rescaling. Returns the factor for what was summed before.
    DEVICE float raise(int i, float top) {
        float next = top > maximum[i] + LAZY ? top : maximum[i];
        return move(i, next);
    }
    DEVICE float move(int i, float next) {
        float factor = exp2_fast(maximum[i] - next);
        maximum[i] = next;
        sum[i] *= factor;
        return factor;
    }
    // s: products to numerators; absent keys have a bias of -inf.
    DEVICE void step(float (&s)[32], const float* bias, const float (&scale)[2], int c, float (&factor)[2]) {
        float top[2] = {LOWEST, LOWEST};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float2 b = *(const float2*)(bias + 8 * j + 2 * c);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[4 * j + i] = fmaf(s[4 * j + i], scale[i / 2], i % 2 ? b.y : b.x);
                top[i / 2] = fmaxf(top[i / 2], s[4 * j + i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) factor[i] = raise(i, quad_max(top[i]));
#pragma unroll
        for (int j = 0; j < 32; j++) {
            s[j] = exp2_fast(s[j] - maximum[j / 2 % 2]);
            sum[j / 2 % 2] += s[j];
        }
    }
};

// All warps of a group or none: the compiler puts waits for running products into the branch.
template <int GROUP_ID>
DEVICE void rescale(float (&o)[128], const float (&factor)[2]) {
    const bool any = named_any(RESCALE_0 + GROUP_ID, 128, factor[0] != 1.0f || factor[1] != 1.0f);
    if (__any_sync(~0u, any)) {  // which tells the compiler that it is the same for a warp
#pragma unroll
        for (int j = 0; j < 128; j++) o[j] *= factor[j / 2 % 2];
    }
    fence_registers(o);
}

// Probabilities as the left operand of a product: words 4 k .. 4 k + 3 are those of keys 16 k .. 16 k + 15.
DEVICE void pack_probabilities(const float (&s)[32], u32 (&words)[16]) {
#pragma unroll
    for (int j = 0; j < 16; j++) words[j] = pack_bf16(s[2 * j], s[2 * j + 1]);
}

DEVICE void put_words(u8* target, const u32 (&words)[16]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        *(uint4*)(target + i * 2048) = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
}
DEVICE void get_words(const u8* source, u32 (&words)[16]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 four = *(const uint4*)(source + i * 2048);
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
}

DEVICE void put_maximum(float2* target, const Softmax& softmax) {
    *target = make_float2(softmax.maximum[0], softmax.maximum[1]);
}
DEVICE void follow_maximum(Softmax& softmax, const float2* source, float (&factor)[2]) {
    const float2 next = *source;
    factor[0] = softmax.move(0, next.x);
    factor[1] = softmax.move(1, next.y);
}
