// What casts to E4M3 share: scales of groups of BF16 numbers, quotients, packing.
//
// The largest size in a group is found on the bits of pairs: those of sizes are ordered as the sizes are, infinity and
// NaN above all. UE8M0 scales (macro UE8M0) are powers of two, others float32; groups that hold what is not finite have
// the scale NaN and codes 0.
#pragma once
#include "../deep_select/cluster.cuh"

#define ALL 0xFFFFFFFFu

struct Scale {
    float scale, inverse;  // 1 of groups that are not finite
    u32 stored;            // bits of a float32 number, or a byte
    u32 keep;              // mask of codes
};

DEVICE u32 sizes(u32 pair) { return pair & 0x7FFF7FFFu; }

DEVICE u32 largest_of(uint4 words) {
    return __vmaxu2(__vmaxu2(sizes(words.x), sizes(words.y)), __vmaxu2(sizes(words.z), sizes(words.w)));
}

DEVICE u32 larger_half_of(u32 pair) { return max(pair & 0xFFFF, pair >> 16); }

// Of a group whose largest size has these BF16 bits.
DEVICE Scale scale_of(u32 largest) {
    bool finite = largest < 0x7F80;
    float most = fmaxf(__uint_as_float(finite ? largest << 16 : 0x3F800000u), 1e-4f);
#if UE8M0
    u32 bits = __float_as_uint(most * (1 / 448.0f));
    u32 byte = (bits >> 23) + ((bits & 0x7FFFFF) != 0);
    return {1.0f, __uint_as_float((254 - byte) << 23), finite ? byte : 255, finite ? ALL : 0};
#else
    float scale = most / 448.0f;
    return {scale, 1.0f / scale, finite ? __float_as_uint(scale) : 0x7FC00000u, finite ? ALL : 0};
#endif
}

// x / scale, correctly rounded: a product with the rounded inverse, and one step with the exact remainder.
DEVICE float quotient(float x, float scale, float inverse) {
    float near = x * inverse;
    return UE8M0 ? near : fmaf(fmaf(-near, scale, x), inverse, near);
}

DEVICE float low_of(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Codes of four BF16 numbers.
DEVICE u32 codes_of(u32 first, u32 second, const Scale& s) {
    u32 low = pack_e4m3(quotient(low_of(first), s.scale, s.inverse), quotient(high_of(first), s.scale, s.inverse));
    u32 high = pack_e4m3(quotient(low_of(second), s.scale, s.inverse), quotient(high_of(second), s.scale, s.inverse));
    return (low | high << 16) & s.keep;
}
