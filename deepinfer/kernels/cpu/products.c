// Dot products with stored weights. Few rows of x: the weights are decoded in registers and multiplied at once, as a
// buffer costs as much as the products. More: decoded into a buffer, once for all rows.
#include "products.h"

static const uint8_t *values_of(const Weight *w, i64 row) {
    const i64 bits = w->kind == ROW_F32 ? 32 : w->kind == ROW_BF16 ? 16 : w->kind == ROW_FP8 ? 8 : 4;
    return (const uint8_t *)w->values + row * w->k * bits / 8;
}
static const uint8_t *scales_of(const Weight *w, i64 row) {
    return w->scales ? w->scales + (w->kind == ROW_FP8 ? row / 32 : row) * (w->k / 32) : NULL;
}

void decode_weight(const Weight *w, i64 first, i64 count, float *out) {
    for (i64 row = first; row < first + count; row++, out += w->k)
        decode_values(w->kind, values_of(w, row), scales_of(w, row), w->k, out);
}

#if LANES == 16  // the accumulators and a group of four columns do not fit into the registers of AVX2
enum { FEW_ROWS = TILE_ROWS };

// dot_tile of common.h over stored columns: the same sums in the same order.
INLINE void stored_tile(const int kind, const int R, const float *const *a, const uint8_t *const *values,
                        const uint8_t *const *scales, i64 k, float *out, i64 ld, int columns) {
    vec acc[TILE_ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) acc[r][c] = (vec){0};
    for (i64 g = 0; g < k / 32; g++) {
        vec b[4][GROUP];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) decode_group(kind, values[c], scales[c], g, b[c]);
#pragma GCC unroll 2
        for (int v = 0; v < GROUP; v++)
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                vec av = load(a[r] + 32 * g + v * LANES);
                IN_REGISTER(av);
#pragma GCC unroll 4
                for (int c = 0; c < 4; c++) acc[r][c] += av * b[c][v];
            }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        float sums[4];
        sum_lanes4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], sums);
        memcpy(out + r * ld, sums, columns * sizeof(float));
    }
}

INLINE void few_rows(const int kind, const float *const *x, i64 n, const Weight *w, i64 first, i64 count, float *out,
                     i64 ldo) {
    for (i64 c = 0; c < count; c += 4) {
        const int width = (int)MIN(4, count - c);
        const uint8_t *values[4], *scales[4];
        for (int i = 0; i < 4; i++) {
            values[i] = values_of(w, first + c + MIN(i, width - 1));
            scales[i] = scales_of(w, first + c + MIN(i, width - 1));
        }
        switch (n) {  // a constant, for the accumulators to stay in registers
        case 1: stored_tile(kind, 1, x, values, scales, w->k, out + c, ldo, width); break;
        case 2: stored_tile(kind, 2, x, values, scales, w->k, out + c, ldo, width); break;
        case 3: stored_tile(kind, 3, x, values, scales, w->k, out + c, ldo, width); break;
        case 4: stored_tile(kind, 4, x, values, scales, w->k, out + c, ldo, width); break;
        case 5: stored_tile(kind, 5, x, values, scales, w->k, out + c, ldo, width); break;
        case 6: stored_tile(kind, 6, x, values, scales, w->k, out + c, ldo, width); break;
        }
    }
}
#else
enum { FEW_ROWS = 0 };
#define few_rows(...)
#endif

void products(const float *const *x, i64 n, const Weight *w, i64 first, i64 count, float *out, i64 ldo, float *buffer) {
    if (w->kind == ROW_F32) {
        dots(x, n, (const float *)w->values + first * w->k, w->k, count, w->k, out, ldo);
    } else if (n > FEW_ROWS || w->k % 32) {
        decode_weight(w, first, count, buffer);
        dots(x, n, buffer, w->k, count, w->k, out, ldo);
    } else {
        switch (w->kind) {
        case ROW_BF16: few_rows(ROW_BF16, x, n, w, first, count, out, ldo); break;
        case ROW_FP8: few_rows(ROW_FP8, x, n, w, first, count, out, ldo); break;
        case ROW_MXFP4: few_rows(ROW_MXFP4, x, n, w, first, count, out, ldo); break;
        }
    }
}
