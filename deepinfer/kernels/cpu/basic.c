// linear, rms_norm, rope, swiglu.
#include "products.h"

EXPORT void rms_norm(const float *x, i64 stride, const float *weight, float eps, i64 n, i64 dim, float *out) {
#pragma omp parallel for if (n * dim > PARALLEL_WORK)
    for (i64 i = 0; i < n; i++) {
        const float *row = x + i * stride;
        scale_rows(row, weight, 1.0f / sqrtf(sum_squares(row, dim) / dim + eps), dim, out + i * dim);
    }
}

// The last pairs of `from`, rotated, to `to`; they may be the same row.
INLINE void rotate(const float *from, const float *cos, const float *sin, float sign, i64 pairs, float *to) {
#pragma omp simd
    for (i64 p = 0; p < pairs; p++) {
        const float even = from[2 * p], odd = from[2 * p + 1], sine = sign * sin[p];
        to[2 * p] = even * cos[p] - odd * sine;
        to[2 * p + 1] = even * sine + odd * cos[p];
    }
}

EXPORT void rope(const float *x, const float *cos, const float *sin, int inverse, i64 n, i64 heads, i64 dim, i64 pairs,
                 float *out) {
    const i64 split = dim - 2 * pairs;
#pragma omp parallel for if (n * heads * dim > PARALLEL_WORK)
    for (i64 i = 0; i < n; i++)
        for (i64 h = 0; h < heads; h++) {
            const float *from = x + (i * heads + h) * dim;
            float *to = out + (i * heads + h) * dim;
            memcpy(to, from, split * sizeof(float));
            rotate(from + split, cos + i * pairs, sin + i * pairs, inverse ? -1.0f : 1.0f, pairs, to + split);
        }
}

EXPORT void norm_rope(const float *x, i64 stride, const float *weight, float eps, const float *cos, const float *sin, i64 n,
                      i64 dim, i64 pairs, float *out) {
    const i64 split = dim - 2 * pairs;
#pragma omp parallel for if (n * dim > PARALLEL_WORK)
    for (i64 i = 0; i < n; i++) {
        float *to = out + i * dim;
        scale_rows(x + i * stride, weight, 1.0f / sqrtf(sum_squares(x + i * stride, dim) / dim + eps), dim, to);
        rotate(to + split, cos + i * pairs, sin + i * pairs, 1.0f, pairs, to + split);
    }
}

EXPORT void swiglu(const float *gate_up, float limit, i64 n, i64 inner, float *out) {
#pragma omp parallel for if (n * inner * 8 > PARALLEL_WORK)
    for (i64 i = 0; i < n; i++) {
        const float *g = gate_up + i * 2 * inner, *u = g + inner;
#pragma omp simd
        for (i64 j = 0; j < inner; j++) {
            const float gate = MIN(limit, g[j]);
            out[i * inner + j] = gate * sigmoid(gate) * MIN(limit, MAX(-limit, u[j]));
        }
    }
}

// A weight [columns, k] in BF16 or E4M3 as float32.
EXPORT void widen(int kind, const void *weight, const uint8_t *scales, i64 k, i64 columns, float *out) {
    const Weight w = {kind, weight, scales, k};
#pragma omp parallel for if (k * columns > PARALLEL_WORK)
    for (i64 c = 0; c < columns; c += 32) decode_weight(&w, c, MIN(32, columns - c), out + c * k);
}

// x [n, groups * k], each group with its own part of a weight [groups * columns, k] as it is stored, which is read once
// for all rows of x.
EXPORT int linear(const float *x, i64 stride, int kind, const void *weight, const uint8_t *scales, i64 n, i64 k,
                  i64 groups, i64 columns, float *out) {
    const Weight w = {kind, weight, scales, k};
    const i64 blocks = (columns + BUFFER_ROWS - 1) / BUFFER_ROWS;  // of a group
    const float **rows = malloc((groups * n + 1) * sizeof *rows);
    int failed = !rows;
    for (i64 r = 0; r < groups * n && !failed; r++) rows[r] = x + r % n * stride + r / n * k;
#pragma omp parallel if (n * k * groups * columns > PARALLEL_WORK)
    {
        float *buffer = malloc((BUFFER_ROWS * k + 1) * sizeof *buffer);
        if (!buffer) failed = 1;
#pragma omp barrier
#pragma omp for
        for (i64 block = 0; block < groups * blocks; block++) {
            if (failed) continue;
            const i64 group = block / blocks, c = block % blocks * BUFFER_ROWS, first = group * columns + c;
            products(rows + group * n, n, &w, first, MIN(BUFFER_ROWS, columns - c), out + first, groups * columns, buffer);
        }
        free(buffer);
    }
    free(rows);
    return failed;
}
