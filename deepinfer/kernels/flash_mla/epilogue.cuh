// The output side: 64 x 256 sums in a warpgroup's registers -> rows of the result, optionally rotated back and cast to FP8.
#pragma once

#include "query.cuh"

struct Output {
    u8* values;  // BF16 [tokens, heads, 512], or E4M3 of the same shape
    u8* scales;  // UE8M0 [tokens, heads, 16], one for 32 values; only with E4M3
};

// 4 x 4 transposition among the four lanes of a quad: word i of lane j goes to word j of lane i.
DEVICE void transpose_quad(u32 (&w)[4], int c) {
    bool odd = c & 1, upper = c & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 got = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
        if (odd) w[i] = got;
        else w[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 got = __shfl_xor_sync(~0u, upper ? w[i] : w[i + 2], 2);
        if (upper) w[i] = got;
        else w[i + 2] = got;
    }
}

// Eight values of a group of 32 columns: v[2 j + e] is column 8 j + 2 c + e, the quad's lanes hold c = 0..3.
// A pair >= 0 asks for rotation by the conjugate: the group starts there among the 32 pairs of `token`.
template <bool FP8>
DEVICE void store_group(float (&v)[8], const Output& out, long long row, int column, int c, const Angles& angles,
                        int token, int pair) {
    if (pair >= 0) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int at = token * 32 + pair + 4 * j + c;
            float cos = __ldg(angles.cos + at), sin = __ldg(angles.sin + at);
            float even = v[2 * j], odd = v[2 * j + 1];
            v[2 * j] = even * cos + odd * sin;
            v[2 * j + 1] = odd * cos - even * sin;
        }
    }
    u32 words[4];
    if (!FP8) {
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] = pack_bf16(v[2 * j], v[2 * j + 1]);
        transpose_quad(words, c);
        store_global_once(out.values + (row * 512 + column + 8 * c) * 2, words[0], words[1], words[2], words[3]);
        return;
    }
    float amax = 1e-4f;
#pragma unroll
    for (int i = 0; i < 8; i++) amax = fmaxf(amax, fabsf(v[i]));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
    u32 bits = __float_as_uint(amax * (1.0f / 448.0f));
    u32 exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0);  // of the smallest power of two that is enough, + 127
    float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int j = 0; j < 4; j++) words[j] = pack_e4m3(v[2 * j] * inverse, v[2 * j + 1] * inverse);
    transpose_quad(words, c);
    uint2 chunk = make_uint2(words[0] | words[1] << 16, words[2] | words[3] << 16);
    *(uint2*)(out.values + row * 512 + column + 8 * c) = chunk;
    if (c == 0) out.scales[row * 16 + column / 32] = (u8)exponent;
}
