// Products in INT8, for drafts (kernels/reference/int8.py). Needs VNNI; elsewhere a weight in BF16 is as fast.
#include "common.h"

#if LANES == 16 && defined(__AVX512VNNI__)
enum { COLUMNS = 16, DEPTH = 4, TILES = 4, ROWS = 5 };  // ROWS x TILES sums stay in registers

EXPORT int multiplies_int8(void) { return 1; }

typedef struct {
    const int8_t *values;
    float scale;
    int32_t offset;  // what 128 too many in each value of a weight adds to a product
} Row;

static Row round_row(const float *x, i64 k, int8_t *out) {
    float largest = 0;
    int is_number = 1;
#pragma omp simd reduction(max : largest) reduction(& : is_number)
    for (i64 i = 0; i < k; i++) {
        largest = MAX(fabsf(x[i]), largest);
        is_number &= fabsf(x[i]) < INFINITY;
    }
    const float scale = largest / 127.0f, by = scale > 0 && is_number ? scale : 1.0f;
    int32_t sum = 0;
    for (i64 i = 0; i < k; i += 16) {
        const __mmask16 inside = (__mmask16)(k - i < 16 ? (1 << (k - i)) - 1 : 0xffff);
        const __m512i v = _mm512_cvtps_epi32(_mm512_div_ps(_mm512_maskz_loadu_ps(inside, x + i), _mm512_set1_ps(by)));
        _mm_mask_storeu_epi8(out + i, inside, _mm512_cvtsepi32_epi8(v));
    }
    for (i64 i = 0; i < k; i++) sum += out[i];
    return (Row){out, is_number ? scale : NAN, 128 * sum};
}

// Logits of R rows and 16 columns times C, behind each other in memory.
INLINE void multiply(const int R, const int C, const Row *rows, const uint8_t *weight, const float *scales, i64 k,
                     vec out[ROWS][TILES]) {
    __m512i sums[ROWS][TILES];
#pragma GCC unroll 5
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[r][c] = _mm512_set1_epi32(-rows[r].offset);
    for (i64 i = 0; i < k; i += DEPTH) {
        __m512i w[TILES];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) w[c] = _mm512_loadu_si512(weight + (c * k + i) * COLUMNS);
#pragma GCC unroll 5
        for (int r = 0; r < R; r++) {
            int32_t four;
            memcpy(&four, rows[r].values + i, 4);
            __m512i x = _mm512_set1_epi32(four);
            IN_REGISTER(x);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) sums[r][c] = _mm512_dpbusd_epi32(sums[r][c], w[c], x);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        const vec scale = load(scales + c * COLUMNS);
#pragma GCC unroll 5
        for (int r = 0; r < R; r++) out[r][c] = (vec)_mm512_cvtepi32_ps(sums[r][c]) * (rows[r].scale * scale);
    }
}

#define EACH_COUNT(n, DO) /* R must be a constant for the sums to stay in registers */ \
    switch (n) {                                                                        \
    case 1: DO(1); break;                                                               \
    case 2: DO(2); break;                                                               \
    case 3: DO(3); break;                                                               \
    case 4: DO(4); break;                                                               \
    case 5: DO(5); break;                                                               \
    }

INLINE void linear_columns(const int R, const int C, const Row *rows, const uint8_t *weight, const float *scales, i64 k,
                           float *out, i64 ld) {
    vec logits[ROWS][TILES];
    multiply(R, C, rows, weight, scales, k, logits);
#pragma GCC unroll 5
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(out + r * ld + c * COLUMNS, logits[r][c]);
}

// x [n, k] times a weight [columns, k]; k is a multiple of 4, columns one of 16.
EXPORT int linear_int8(const float *x, i64 stride, const uint8_t *weight, const float *scales, i64 n, i64 k, i64 columns,
                       float *out) {
    int8_t *values = malloc(n * k + 1);
    Row *rows = malloc((n + 1) * sizeof *rows);
    const int failed = !values || !rows;
    for (i64 i = 0; i < n && !failed; i++) rows[i] = round_row(x + i * stride, k, values + i * k);
#pragma omp parallel for if (n * k * columns > 8 * PARALLEL_WORK)
    for (i64 first = 0; first < (failed ? 0 : columns); first += TILES * COLUMNS) {
        const uint8_t *w = weight + first * k;
        for (i64 r = 0; r < n; r += ROWS) {
            float *to = out + r * columns + first;
#define WIDE(R) linear_columns(R, TILES, rows + r, w, scales + first, k, to, columns)
#define NARROW(R) linear_columns(R, 1, rows + r, w + c * k, scales + first + c, k, to + c, columns)
            if (columns - first >= TILES * COLUMNS) {
                EACH_COUNT(MIN(ROWS, n - r), WIDE)
            } else {
                for (i64 c = 0; c < columns - first; c += COLUMNS) EACH_COUNT(MIN(ROWS, n - r), NARROW)
            }
        }
    }
    free(values);
    free(rows);
    return failed;
}

// The columns of the largest of `columns` logits in each of R rows, the first of equals: base + row . column.
INLINE void largest(const int R, const Row *rows, const uint8_t *weight, const float *scales, i64 k, i64 columns,
                    const float *const *base, i64 *found) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    vec best[ROWS];
    __m512i at[ROWS];
#pragma GCC unroll 5
    for (int r = 0; r < R; r++) best[r] = (vec)_mm512_set1_ps(-INFINITY), at[r] = lanes;
    for (i64 c = 0; c < columns; c += COLUMNS) {
        vec logits[ROWS][TILES];
        multiply(R, 1, rows, weight + c * k, scales + c, k, logits);
        const __m512i column = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)c));
#pragma GCC unroll 5
        for (int r = 0; r < R; r++) {
            const vec sum = load(base[r] + c) + logits[r][0];
            const __mmask16 above = _mm512_cmp_ps_mask((__m512)sum, (__m512)best[r], _CMP_GT_OQ);
            best[r] = (vec)_mm512_mask_mov_ps((__m512)best[r], above, (__m512)sum);
            at[r] = _mm512_mask_mov_epi32(at[r], above, column);
        }
    }
#pragma GCC unroll 5
    for (int r = 0; r < R; r++) {
        float value[COLUMNS];
        int32_t column[COLUMNS];
        memcpy(value, &best[r], sizeof value);
        memcpy(column, &at[r], sizeof column);
        int lane = 0;
        for (int i = 1; i < COLUMNS; i++)
            if (value[i] > value[lane] || (value[i] == value[lane] && column[i] < column[lane])) lane = i;
        found[r] = column[lane];
    }
}

// base [n, drafts, columns]; embed [columns, k]; tokens [n] -> out [n, drafts].
EXPORT int chain_drafts(const float *base, const float *embed, const uint8_t *weight, const float *scales,
                        const i64 *tokens, i64 n, i64 drafts, i64 columns, i64 k, i64 *out) {
    int failed = 0;
#pragma omp parallel for if (n > ROWS)
    for (i64 first = 0; first < n; first += ROWS) {
        const int count = (int)MIN(ROWS, n - first);
        int8_t *values = malloc(ROWS * k);
        if (!values) {
            failed = 1;
            continue;
        }
        i64 latest[ROWS];
        memcpy(latest, tokens + first, count * sizeof *latest);
        for (i64 i = 0; i < drafts; i++) {
            Row rows[ROWS];
            const float *logits[ROWS];
            for (int r = 0; r < count; r++) {
                rows[r] = round_row(embed + latest[r] * k, k, values + r * k);
                logits[r] = base + ((first + r) * drafts + i) * columns;
            }
#define LARGEST(R) largest(R, rows, weight, scales, k, columns, logits, latest)
            EACH_COUNT(count, LARGEST)
            for (int r = 0; r < count; r++) out[(first + r) * drafts + i] = latest[r];
        }
        free(values);
    }
    return failed;
}
#else
EXPORT int multiplies_int8(void) { return 0; }
EXPORT int linear_int8(const float *x, i64 stride, const uint8_t *weight, const float *scales, i64 n, i64 k, i64 columns,
                       float *out) { return 1; }
EXPORT int chain_drafts(const float *base, const float *embed, const uint8_t *weight, const float *scales,
                        const i64 *tokens, i64 n, i64 drafts, i64 columns, i64 k, i64 *out) { return 1; }
#endif
