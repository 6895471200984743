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

INLINE float e8m0_value(uint8_t e) { return as_float(e ? (uint32_t)e << 23 : 0x00400000u); }
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

INLINE void decode_nibbles(const uint8_t *packed, float scale, i64 n, float *out) {
#pragma omp simd
    for (i64 i = 0; i < n / 2; i++) {
        out[2 * i] = e2m1_value(packed[i] & 15) * scale;
        out[2 * i + 1] = e2m1_value(packed[i] >> 4) * scale;
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
        for (i64 g = 0; g < dim / 32; g++) {
            const float scale = e8m0_value(bytes[dim + g]);
#pragma omp simd
            for (int i = 0; i < 32; i++) out[32 * g + i] = e4m3_value(bytes[32 * g + i]) * scale;
        }
        break;
    case ROW_MXFP4:
        for (i64 g = 0; g < dim / 32; g++)
            decode_nibbles(bytes + 16 * g, e8m0_value(bytes[dim / 2 + g]), 32, out + 32 * g);
        break;
    case ROW_NVFP4:
        for (i64 g = 0; g < dim / 16; g++)
            decode_nibbles(bytes + 8 * g, e4m3_value(bytes[dim / 2 + g]), 16, out + 16 * g);
        break;
    }
}
