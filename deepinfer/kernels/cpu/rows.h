// Decoding of stored rows (spec: model, section 7). Exact: every product below is representable.
#pragma once
#include "common.h"

enum row_kind { ROW_F32, ROW_BF16, ROW_FP8, ROW_MXFP4, ROW_NVFP4 };

// A cache [pages, page_size, row] with arbitrary strides (bytes); the row itself is contiguous.
typedef struct {
    const char *data;
    i64 page_size, page_stride, row_stride;
    int kind;
} Rows;

INLINE const void *row_at(const Rows *rows, i64 slot) {
    return rows->data + slot / rows->page_size * rows->page_stride + slot % rows->page_size * rows->row_stride;
}

INLINE float e8m0_value(uint8_t e) { return as_float(e == 255 ? 0x7fc00000u : e ? (uint32_t)e << 23 : 0x00400000u); }
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

// 16 bytes of E2M1 pairs -> 32 values, low nibble first; one scale for each half.
INLINE void decode_e2m1_32(const uint8_t *packed, float scale0, float scale1, float *out) {
#if defined(__AVX2__)
    // Look-ups read the low bits of an index only, so the other nibble may stay in it.
    const __m128i bytes = _mm_loadu_si128((const __m128i *)packed), shifted = _mm_srli_epi16(bytes, 4);
    const __m128i codes[2] = {_mm_unpacklo_epi8(bytes, shifted), _mm_unpackhi_epi8(bytes, shifted)};
#endif
#if defined(__AVX512F__)
    const __m512 table = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    for (int half = 0; half < 2; half++) {
        const __m512 value = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes[half]), table);
        _mm512_storeu_ps(out + 16 * half, _mm512_mul_ps(value, _mm512_set1_ps(half ? scale1 : scale0)));
    }
#elif defined(__AVX2__)
    const __m256 table = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i sign = _mm256_set1_epi32((int)0x80000000u);
    for (int part = 0; part < 4; part++) {
        const __m128i eight = part % 2 ? _mm_srli_si128(codes[part / 2], 8) : codes[part / 2];
        const __m256i code = _mm256_cvtepu8_epi32(eight);
        const __m256 factor = _mm256_set1_ps(part < 2 ? scale0 : scale1);
        const __m256 value = _mm256_mul_ps(_mm256_permutevar8x32_ps(table, code), factor);
        const __m256i negative = _mm256_and_si256(_mm256_slli_epi32(code, 28), sign);
        _mm256_storeu_ps(out + 8 * part, _mm256_xor_ps(value, _mm256_castsi256_ps(negative)));
    }
#else
    for (int i = 0; i < 16; i++) {
        out[2 * i] = e2m1_value(packed[i] & 15) * (i < 8 ? scale0 : scale1);
        out[2 * i + 1] = e2m1_value(packed[i] >> 4) * (i < 8 ? scale0 : scale1);
    }
#endif
}
INLINE void decode_mxfp4(const uint8_t *packed, const uint8_t *scales, i64 dim, float *out) {
    for (i64 g = 0; g < dim / 32; g++) {
        const float scale = e8m0_value(scales[g]);
        decode_e2m1_32(packed + 16 * g, scale, scale, out + 32 * g);
    }
}

// E4M3 bytes with an E8M0 scale for 32 of them.
INLINE void decode_fp8(const uint8_t *bytes, const uint8_t *scales, i64 dim, float *out) {
    for (i64 g = 0; g < dim / 32; g++) {
        const float scale = e8m0_value(scales[g]);
#if defined(__AVX2__) && defined(__F16C__)
        // The bits of a byte, moved up, are those of its value times 2^-8 in half precision; NaN is put in.
        const __m256 to_value = _mm256_set1_ps(256.0f), factor = _mm256_set1_ps(scale);
        for (int half = 0; half < 2; half++) {
            const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(bytes + 32 * g + 16 * half)));
            const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
            const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(_mm256_set1_epi16(0x7f), wide), 8);
            const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
            const __m256i nan = _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00));
            const __m256i bits = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign), nan);
            const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(bits));
            const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
            _mm256_storeu_ps(out + 32 * g + 16 * half, _mm256_mul_ps(_mm256_mul_ps(low, to_value), factor));
            _mm256_storeu_ps(out + 32 * g + 16 * half + 8, _mm256_mul_ps(_mm256_mul_ps(high, to_value), factor));
        }
#else
#pragma omp simd
        for (int i = 0; i < 32; i++) out[32 * g + i] = e4m3_value(bytes[32 * g + i]) * scale;
#endif
    }
}

static inline __attribute__((unused)) void decode_row(int kind, const void *row, i64 dim, float *out) {
    const uint8_t *bytes = row;
    switch (kind) {
    case ROW_F32: memcpy(out, row, dim * sizeof(float)); break;
    case ROW_BF16:
#pragma omp simd
        for (i64 i = 0; i < dim; i++) out[i] = as_float((uint32_t)((const uint16_t *)row)[i] << 16);
        break;
    case ROW_FP8:
        decode_fp8(bytes, bytes + dim, dim, out);
        break;
    case ROW_MXFP4: decode_mxfp4(bytes, bytes + dim / 2, dim, out); break;
    case ROW_NVFP4: {
        const uint8_t *scales = bytes + dim / 2;
        for (i64 g = 0; g < dim / 32; g++)
            decode_e2m1_32(bytes + 16 * g, e4m3_value(scales[2 * g]), e4m3_value(scales[2 * g + 1]), out + 32 * g);
        break;
    }
    }
}
