// Decoding of 32 values at a time, with what AVX-512, AVX2 or plain C offer.
#pragma once
#include "common.h"

// What a row holds. E4M3: FP8 without its scales.
enum row_kind { ROW_F32, ROW_BF16, ROW_FP8, ROW_MXFP4, ROW_NVFP4, ROW_E4M3 };
enum { GROUP = 32 / LANES };  // vectors of 32 values

INLINE float e4m3_value(uint8_t b) {
    const uint32_t magnitude = b & 0x7f, sign = (uint32_t)(b & 0x80) << 24;
    const uint32_t normal = (magnitude << 20) + (120u << 23);
    const uint32_t subnormal = as_bits((float)(int32_t)magnitude * 0x1p-9f);
    const uint32_t bits = magnitude < 8 ? subnormal : normal;
    return as_float((magnitude == 0x7f ? 0x7fc00000u : bits) | sign);
}
INLINE float e2m1_value(uint32_t code) {
    const uint32_t magnitude = code & 7, sign = (code & 8) << 28;
    const uint32_t normal = (magnitude + 252) << 22;
    return as_float((magnitude > 1 ? normal : magnitude ? 0x3f000000u : 0u) | sign);
}
INLINE float e8m0_value(uint8_t e) { return as_float(e == 255 ? 0x7fc00000u : e ? (uint32_t)e << 23 : 0x00400000u); }

INLINE vec bf16_lanes(const uint16_t *values) {
#if LANES == 16
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)values)), 16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)values)), 16);
#else
    float out[LANES];
    for (int i = 0; i < LANES; i++) out[i] = as_float((uint32_t)values[i] << 16);
    return load(out);
#endif
}

// E4M3 values times 2^-8: the bits of a byte, moved up, are those in half precision; NaN is put in.
INLINE vec e4m3_lanes(const uint8_t *bytes) {
#if LANES == 16
    const __m256i nan = _mm256_set1_epi16(0x7f), wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)bytes));
    const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbf80));
    const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(wide, nan), nan);
    return (vec)_mm512_cvtph_ps(_mm256_mask_mov_epi16(bits, is_nan, _mm256_set1_epi16(0x7e00)));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i nan = _mm_set1_epi16(0x7f), wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)bytes));
    const __m128i bits = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbf80));
    const __m128i is_nan = _mm_cmpeq_epi16(_mm_and_si128(wide, nan), nan);
    return (vec)_mm256_cvtph_ps(_mm_blendv_epi8(bits, _mm_set1_epi16(0x7e00), is_nan));
#else
    float out[LANES];
#pragma omp simd
    for (int i = 0; i < LANES; i++) out[i] = e4m3_value(bytes[i]) * 0x1p-8f;
    return load(out);
#endif
}

#if LANES == 16
#define E4M3_UNIT 0x1p120f
// 32 E4M3 values divided by E4M3_UNIT, none of them NaN: sign, exponent and mantissa become those of a float.
INLINE void e4m3_numbers(const uint8_t *bytes, vec out[2]) {
    for (int v = 0; v < 2; v++) {
        const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(bytes + 16 * v)));
        out[v] = (vec)_mm512_and_si512(_mm512_slli_epi32(wide, 20), _mm512_set1_epi32((int)0x87f00000u));
    }
}
#endif

// 16 bytes of E2M1 pairs -> 32 values, low nibble first; a scale for each half. The tables are scaled, not the values.
INLINE void e2m1_group(const uint8_t *packed, const float scale[2], vec out[GROUP]) {
#if defined(__AVX2__)
    // Look-ups read the low bits of an index only, so the other nibble may stay in it.
    const __m128i bytes = _mm_loadu_si128((const __m128i *)packed), shifted = _mm_srli_epi16(bytes, 4);
    const __m128i codes[2] = {_mm_unpacklo_epi8(bytes, shifted), _mm_unpackhi_epi8(bytes, shifted)};
#endif
#if LANES == 16
    const __m512 table = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    for (int v = 0; v < 2; v++) {
        const __m512 scaled = _mm512_mul_ps(table, _mm512_set1_ps(scale[v]));
        out[v] = (vec)_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes[v]), scaled);
    }
#elif defined(__AVX2__)
    const __m256 table = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i sign = _mm256_set1_epi32((int)0x80000000u);
    for (int v = 0; v < 4; v++) {
        const __m256 scaled = _mm256_mul_ps(table, _mm256_set1_ps(scale[v / 2]));
        const __m256i code = _mm256_cvtepu8_epi32(v % 2 ? _mm_srli_si128(codes[v / 2], 8) : codes[v / 2]);
        const __m256i negative = _mm256_and_si256(_mm256_slli_epi32(code, 28), sign);
        out[v] = (vec)_mm256_xor_ps(_mm256_permutevar8x32_ps(scaled, code), _mm256_castsi256_ps(negative));
    }
#else
    float values[32];
    for (int i = 0; i < 16; i++) {
        values[2 * i] = e2m1_value(packed[i] & 15) * scale[i / 8];
        values[2 * i + 1] = e2m1_value(packed[i] >> 4) * scale[i / 8];
    }
    for (int v = 0; v < GROUP; v++) out[v] = load(values + v * LANES);
#endif
}

// 32 values. Scales: one E8M0 (FP8, MXFP4), or one E4M3 for each half (NVFP4).
INLINE void decode_group(const int kind, const uint8_t *values, const uint8_t *scales, vec out[GROUP]) {
    if (kind == ROW_BF16) {
        for (int v = 0; v < GROUP; v++) out[v] = bf16_lanes((const uint16_t *)values + v * LANES);
#if LANES == 16
    } else if (kind == ROW_E4M3) {
        e4m3_numbers(values, out);
#endif
    } else if (kind == ROW_FP8) {
        const int is_large = *scales > 246;  // 2^8 times such a scale is no number
        const float scale = e8m0_value(*scales) * (is_large ? 1.0f : 256.0f);
        for (int v = 0; v < GROUP; v++) out[v] = e4m3_lanes(values + v * LANES) * scale;
        for (int v = 0; is_large && v < GROUP; v++) out[v] *= 256.0f;
    } else if (kind == ROW_MXFP4) {
        const float scale = e8m0_value(*scales);
        e2m1_group(values, (float[2]){scale, scale}, out);
    } else {
        e2m1_group(values, (float[2]){e4m3_value(scales[0]), e4m3_value(scales[1])}, out);
    }
}

#if LANES == 16 && defined(__AVX512VBMI__)
#include "e2m1_vbmi.h"
#endif

// Two groups, of one row or of two.
INLINE void decode_pair(const int kind, const uint8_t *const values[2], const uint8_t *const scales[2],
                        vec out[2][GROUP]) {
#ifdef HAS_E2M1_PAIR
    if (kind == ROW_MXFP4) {
        e2m1_pair(values[0], values[1], *scales[0], *scales[1], out);
        return;
    }
#endif
    decode_group(kind, values[0], scales[0], out[0]);
    decode_group(kind, values[1], scales[1], out[1]);
}
