// Shared by the CPU kernels: vectors, tiles of dot products, exp. Plain C with GCC vector extensions, so that one
// source becomes AVX-512, AVX2, NEON or scalar code, whichever `-march=native` offers where it is compiled.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#define THREADS omp_get_max_threads()
#else
#define THREADS 1
#endif

typedef int64_t i64;
#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline, unused))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
// Multiply-adds below which starting threads costs more than it saves.
#define PARALLEL_WORK 100000

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

INLINE vec load(const float *p) { return *(const vec_unaligned *)p; }
INLINE void store(float *p, vec v) { *(vec_unaligned *)p = v; }
INLINE float sum_lanes(vec v) {
    float s[LANES];
    memcpy(s, &v, sizeof s);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}

INLINE uint32_t as_bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float as_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

// e^x within about 2 ulp; vectorises, unlike expf.
INLINE float fast_exp(float x) {
    x = MIN(MAX(x, -87.0f), 88.0f);
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float n = (x * 1.44269504f + shift) - shift;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * as_float((uint32_t)((int32_t)n + 127) << 23);
}
INLINE float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

INLINE float sum_squares(const float *x, i64 n) {
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (i64 i = 0; i < n; i++) s += x[i] * x[i];
    return s;
}
INLINE void scale_rows(const float *x, const float *w, float factor, i64 n, float *out) {
#pragma omp simd
    for (i64 i = 0; i < n; i++) out[i] = w[i] * (x[i] * factor);
}

// R x C dot products of length k. One accumulator a pair, so a result does not depend on the tile it was computed in.
#define TILE_COLUMNS 4
INLINE void dot_tile(const int R, const float *const *a, const float *const *b, i64 k, float *out, i64 ld, int columns) {
    enum { C = TILE_COLUMNS };
    vec acc[4][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[r][c] = (vec){0};
    const i64 whole = k - k % LANES;
    for (i64 i = 0; i < whole; i += LANES) {
        vec bv[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) bv[c] = load(b[c] + i);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const vec av = load(a[r] + i);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) acc[r][c] += av * bv[c];
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < columns; c++) {
            float s = sum_lanes(acc[r][c]);
            for (i64 i = whole; i < k; i++) s += a[r][i] * b[c][i];
            out[r * ld + c] = s;
        }
}

// out[r, c] = a[r] . b[c]; a: pointers to rows, b: rows ldb apart.
static inline __attribute__((unused)) void dots(
    const float *const *a, i64 rows, const float *b, i64 ldb, i64 columns, i64 k, float *out, i64 ldo) {
    for (i64 c = 0; c < columns; c += TILE_COLUMNS) {
        const int width = (int)MIN(TILE_COLUMNS, columns - c);
        const float *bs[TILE_COLUMNS];
        for (int i = 0; i < TILE_COLUMNS; i++) bs[i] = b + (c + MIN(i, width - 1)) * ldb;
        i64 r = 0;
        for (; r + 4 <= rows; r += 4) dot_tile(4, a + r, bs, k, out + r * ldo + c, ldo, width);
        for (; r + 2 <= rows; r += 2) dot_tile(2, a + r, bs, k, out + r * ldo + c, ldo, width);
        for (; r < rows; r++) dot_tile(1, a + r, bs, k, out + r * ldo + c, ldo, width);
    }
}
