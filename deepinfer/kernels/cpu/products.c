// Dot products with stored weights. With AVX-512 they are decoded in registers and multiplied at once with six rows of x,
// as a buffer costs as much as the products. Else they are decoded into a buffer, once for all rows.
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

enum { FEW_ROWS = 3 * TILE_ROWS, DECODED = 16 };  // rows of a weight that fit into the nearest cache

#if LANES == 16  // the accumulators and a group of four columns do not fit into the registers of AVX2
// Bytes in front of what is multiplied that go to the second cache: a processor sees only where a row leads, not the next.
enum { AHEAD = 16384 };

// dot_tile of common.h over stored columns: the same sums in the same order.
INLINE void stored_tile(const int kind, const int R, const float *const *a, const uint8_t *const *values,
                        const uint8_t *const *scales, i64 k, float *out, i64 ld, int columns) {
    vec acc[TILE_ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) acc[r][c] = (vec){0};
    const i64 size = kind == ROW_BF16 ? 64 : kind == ROW_MXFP4 ? 16 : 32, scaled = scales[0] != NULL;  // of a group
    for (i64 g = 0; g < k / 32; g++)
#pragma GCC unroll 2
        for (int c = 0; c < 4; c += 2) {  // decoding between the products, and in few registers
            vec b[2][GROUP];
            __builtin_prefetch(values[c] + g * size + AHEAD, 0, 2);
            __builtin_prefetch(values[c + 1] + g * size + AHEAD, 0, 2);
            decode_pair(kind, (const uint8_t *[2]){values[c] + g * size, values[c + 1] + g * size},
                        (const uint8_t *[2]){scales[c] + g * scaled, scales[c + 1] + g * scaled}, b);
#pragma GCC unroll 2
            for (int v = 0; v < GROUP; v++)
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    vec av = load(a[r] + 32 * g + v * LANES);
                    IN_REGISTER(av);
                    acc[r][c] += av * b[0][v];
                    acc[r][c + 1] += av * b[1][v];
                }
        }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        float sums[4];
        sum_lanes4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], sums);
        if (columns == 4) memcpy(out + r * ld, sums, sizeof sums);
        else
            for (int c = 0; c < columns; c++) out[r * ld + c] = sums[c];
    }
}

INLINE void stored_products(const int kind, const float *const *x, i64 n, const Weight *w, i64 first, i64 count,
                            float *out, i64 ldo) {
    for (i64 c = 0; c < count; c += 4) {
        const int width = (int)MIN(4, count - c);
        const uint8_t *values[4], *scales[4];
        for (int i = 0; i < 4; i++) {
            values[i] = values_of(w, first + c + MIN(i, width - 1));
            scales[i] = scales_of(w, first + c + MIN(i, width - 1));
        }
        for (i64 r = 0; r < n; r += TILE_ROWS) {
            const float *const *rows = x + r;
            float *to = out + r * ldo + c;
            switch (MIN(TILE_ROWS, n - r)) {  // a constant, for the accumulators to stay in registers
            case 1: stored_tile(kind, 1, rows, values, scales, w->k, to, ldo, width); break;
            case 2: stored_tile(kind, 2, rows, values, scales, w->k, to, ldo, width); break;
            case 3: stored_tile(kind, 3, rows, values, scales, w->k, to, ldo, width); break;
            case 4: stored_tile(kind, 4, rows, values, scales, w->k, to, ldo, width); break;
            case 5: stored_tile(kind, 5, rows, values, scales, w->k, to, ldo, width); break;
            case 6: stored_tile(kind, 6, rows, values, scales, w->k, to, ldo, width); break;
            }
        }
    }
}

static int has_nan(const uint8_t *bytes, i64 n) {
    uint8_t most = 0;
#pragma omp simd reduction(max : most)
    for (i64 i = 0; i < n; i++) most = MAX(most, (uint8_t)(bytes[i] & 0x7f));
    return most == 0x7f;
}

// to = x times the scales of its groups and E4M3_UNIT; whether all are numbers.
static int scale_groups(const float *x, const uint8_t *scales, i64 k, float *to) {
    vec zero = {0};
    for (i64 g = 0; g < k / 32; g++) {
        const float scale = e8m0_value(scales[g]) * E4M3_UNIT;
        for (i64 i = 32 * g; i < 32 * g + 32; i += LANES) {
            const vec scaled = load(x + i) * scale;
            zero += scaled * 0.0f;
            store(to + i, scaled);
        }
    }
    float sums[4];
    sum_lanes4(zero, zero, zero, zero, sums);
    return sums[0] == 0;
}

// FP8: the rows of x are scaled instead of the weights, once for all columns that have the same 32 x 32 scales. The
// products are the same numbers; where there are none (infinity, NaN), the weights are scaled.
static void fp8_products(const float *const *x, i64 n, const Weight *w, i64 first, i64 count, float *out, i64 ldo,
                         float *buffer) {
    const uint8_t *scales = scales_of(w, first);
    const float *rows[2 * TILE_ROWS];  // scaled at once; they fit into `buffer`
    int finite = !has_nan(values_of(w, first), count * w->k);
    for (i64 start = 0; start < n; start += LENGTH(rows)) {
        const i64 size = MIN(LENGTH(rows), n - start);
        for (i64 r = 0; r < size && finite; r++) {
            float *to = buffer + r * w->k;
            rows[r] = to;
            finite = scale_groups(x[start + r], scales, w->k, to);
        }
        if (finite) stored_products(ROW_E4M3, rows, size, w, first, count, out + start * ldo, ldo);
        else stored_products(ROW_FP8, x + start, size, w, first, count, out + start * ldo, ldo);
    }
}
#endif

void products(const float *const *x, i64 n, const Weight *w, i64 first, i64 count, float *out, i64 ldo, float *buffer) {
    if (w->kind == ROW_F32) {
        dots(x, n, (const float *)w->values + first * w->k, w->k, count, w->k, out, ldo);
        return;
    }
#if LANES == 16
    if (w->kind == ROW_BF16 && w->k % 32 == 0) {
        stored_products(ROW_BF16, x, n, w, first, count, out, ldo);
        return;
    }
    if (w->kind == ROW_MXFP4) {
        stored_products(ROW_MXFP4, x, n, w, first, count, out, ldo);
        return;
    }
    if (w->kind == ROW_FP8 && n <= FEW_ROWS) {
        const i64 same = MIN(count, 32 - first % 32);  // columns in front of the next row of scales
        fp8_products(x, n, w, first, same, out, ldo, buffer);
        if (same < count) fp8_products(x, n, w, first + same, count - same, out + same, ldo, buffer);
        return;
    }
#endif
    for (i64 c = 0; c < count; c += DECODED) {
        const i64 width = MIN(DECODED, count - c);
        decode_weight(w, first + c, width, buffer);
        dots(x, n, buffer, w->k, width, w->k, out + c, ldo);
    }
}
