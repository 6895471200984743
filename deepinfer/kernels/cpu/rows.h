// Decoding of stored rows (spec: model, section 7). Exact: every product below is representable.
#pragma once
#include "groups.h"

// A cache [pages, page_size, row] with arbitrary strides (bytes); the row itself is contiguous.
typedef struct {
    const char *data;
    i64 page_size, page_stride, row_stride;
    int kind;
} Rows;

INLINE const void *row_at(const Rows *rows, i64 slot) {
    return rows->data + slot / rows->page_size * rows->page_stride + slot % rows->page_size * rows->row_stride;
}

INLINE void decode_groups(const int kind, const uint8_t *values, const uint8_t *scales, i64 dim, float *out) {
    const i64 size = kind == ROW_BF16 ? 64 : kind == ROW_FP8 ? 32 : 16;  // of a group of 32
    const i64 num_scales = kind == ROW_BF16 ? 0 : kind == ROW_NVFP4 ? 2 : 1;
    for (i64 g = 0; g < dim / 32; g++) {
        vec group[GROUP];
        decode_group(kind, values + g * size, scales + g * num_scales, group);
        for (int v = 0; v < GROUP; v++) store(out + 32 * g + v * LANES, group[v]);
    }
}

// `dim` values of a row, 32 at a time where they are packed.
static inline __attribute__((unused)) void decode_values(
    int kind, const uint8_t *values, const uint8_t *scales, i64 dim, float *out) {
    switch (kind) {
    case ROW_F32: memcpy(out, values, dim * sizeof(float)); break;
    case ROW_BF16:
        decode_groups(ROW_BF16, values, NULL, dim, out);
        for (i64 i = dim - dim % 32; i < dim; i++) out[i] = as_float((uint32_t)((const uint16_t *)values)[i] << 16);
        break;
    case ROW_FP8: decode_groups(ROW_FP8, values, scales, dim, out); break;
    case ROW_MXFP4: decode_groups(ROW_MXFP4, values, scales, dim, out); break;
    case ROW_NVFP4: decode_groups(ROW_NVFP4, values, scales, dim, out); break;
    }
}

// A row of a cache: its scales follow its values.
static inline __attribute__((unused)) void decode_row(int kind, const void *row, i64 dim, float *out) {
    decode_values(kind, row, (const uint8_t *)row + (kind == ROW_FP8 ? dim : dim / 2), dim, out);
}
