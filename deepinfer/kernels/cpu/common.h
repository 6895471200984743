// Shared by the CPU kernels: vectors, tiles of dot products, exp. Plain C with GCC vector extensions, so that one
// source becomes AVX-512, AVX2, NEON or scalar code, whichever `-march=native` offers where it is compiled.
#pragma once
#ifdef __AVX2__
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
int omp_get_max_threads(void);  // declared here: clang comes without omp.h more often than without the runtime
#define THREADS omp_get_max_threads()
#else
#define THREADS 1
#endif

typedef int64_t i64;
#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline, unused))
// NaN in the second argument comes out, NaN in the first does not: put the limit first where NaN must pass.
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define LENGTH(array) (i64)(sizeof(array) / sizeof *(array))
// Multiply-adds below which starting threads costs more than it saves.
#define PARALLEL_WORK 100000

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LANES 16
#else
#define LANES 8
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

INLINE vec load(const float *p) { return *(const vec_unaligned *)p; }
INLINE void store(float *p, vec v) { *(vec_unaligned *)p = v; }
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
// {sum of a, sum of b, sum of c, sum of d}: interleave and add, then add the 128-bit quarters.
INLINE void sum_lanes4(vec a, vec b, vec c, vec d, float out[4]) {
#if LANES == 16
#define EVEN(x, y) SHUFFLE(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define ODD(x, y) SHUFFLE(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW(x, y) SHUFFLE(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH(x, y) SHUFFLE(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#else
#define EVEN(x, y) SHUFFLE(x, y, 0, 8, 1, 9, 4, 12, 5, 13)
#define ODD(x, y) SHUFFLE(x, y, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW(x, y) SHUFFLE(x, y, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH(x, y) SHUFFLE(x, y, 2, 3, 10, 11, 6, 7, 14, 15)
#endif
    const vec ab = EVEN(a, b) + ODD(a, b), cd = EVEN(c, d) + ODD(c, d);
    vec s = LOW(ab, cd) + HIGH(ab, cd);
#if LANES == 16
    const __m256 half = _mm512_castps512_ps256((__m512)s) + _mm512_extractf32x8_ps((__m512)s, 1);
    _mm_storeu_ps(out, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#else
    s += SHUFFLE(s, s, 4, 5, 6, 7, 0, 1, 2, 3);
    memcpy(out, &s, 16);
#endif
}

INLINE uint32_t as_bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float as_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

// e^x within about 2 ulp, NaN for NaN; vectorises, unlike expf.
INLINE float fast_exp(float x) {
    x = MIN(88.0f, MAX(-87.0f, x));
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

// Keeps GCC from reading the operand again from memory for every multiply-add.
#ifdef __AVX2__
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#else
#define IN_REGISTER(v)
#endif

// R x 4 dot products of length k. One accumulator a pair, so a result does not depend on the tile it was computed in.
enum { TILE_COLUMNS = 4, TILE_ROWS = LANES == 16 ? 6 : 3 };  // what the vector registers hold
INLINE void dot_tile(const int R, const float *const *a, const float *const *b, i64 k, float *out, i64 ld, int columns) {
    vec acc[TILE_ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) acc[r][c] = (vec){0};
    const i64 whole = k - k % LANES;
    for (i64 i = 0; i < whole; i += LANES) {
        vec bv[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            bv[c] = load(b[c] + i);
            IN_REGISTER(bv[c]);
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            vec av = load(a[r] + i);
            IN_REGISTER(av);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) acc[r][c] += av * bv[c];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        float sums[4];
        sum_lanes4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], sums);
        for (i64 i = whole; i < k; i++)
            for (int c = 0; c < 4; c++) sums[c] += a[r][i] * b[c][i];
        if (columns == 4) memcpy(out + r * ld, sums, sizeof sums);
        else
            for (int c = 0; c < columns; c++) out[r * ld + c] = sums[c];
    }
}

// out[r, c] = a[r] . b[c]; a: pointers to rows, b: rows ldb apart.
static inline __attribute__((unused)) void dots(
    const float *const *a, i64 rows, const float *b, i64 ldb, i64 columns, i64 k, float *out, i64 ldo) {
    for (i64 c = 0; c < columns; c += TILE_COLUMNS) {
        const int width = (int)MIN(TILE_COLUMNS, columns - c);
        const float *bs[TILE_COLUMNS];
        for (int i = 0; i < TILE_COLUMNS; i++) bs[i] = b + (c + MIN(i, width - 1)) * ldb;
        for (i64 r = 0; r < rows; r += TILE_ROWS) {
            float *to = out + r * ldo + c;
            switch (MIN(TILE_ROWS, rows - r)) {  // R must be a constant for the accumulators to stay in registers
            case 1: dot_tile(1, a + r, bs, k, to, ldo, width); break;
            case 2: dot_tile(2, a + r, bs, k, to, ldo, width); break;
            case 3: dot_tile(3, a + r, bs, k, to, ldo, width); break;
#if LANES == 16
            case 4: dot_tile(4, a + r, bs, k, to, ldo, width); break;
            case 5: dot_tile(5, a + r, bs, k, to, ldo, width); break;
            case 6: dot_tile(6, a + r, bs, k, to, ldo, width); break;
#endif
            }
        }
    }
}
