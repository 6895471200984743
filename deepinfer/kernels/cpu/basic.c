// linear, rms_norm, rope, swiglu.
#include "common.h"

EXPORT void rms_norm(const float *x, i64 stride, const float *weight, float eps, i64 n, i64 dim, float *out) {
#pragma omp parallel for if (n * dim > PARALLEL_WORK)
    for (i64 i = 0; i < n; i++) {
        const float *row = x + i * stride;
        scale_rows(row, weight, 1.0f / sqrtf(sum_squares(row, dim) / dim + eps), dim, out + i * dim);
    }
}

EXPORT void rope(const float *x, const float *cos, const float *sin, int inverse, i64 n, i64 heads, i64 dim, i64 pairs,
                 float *out) {
    const i64 split = dim - 2 * pairs;
    const float sign = inverse ? -1.0f : 1.0f;
#pragma omp parallel for if (n * heads * dim > PARALLEL_WORK)
    for (i64 i = 0; i < n; i++)
        for (i64 h = 0; h < heads; h++) {
            const float *from = x + (i * heads + h) * dim, *c = cos + i * pairs, *s = sin + i * pairs;
            float *to = out + (i * heads + h) * dim;
            memcpy(to, from, split * sizeof(float));
#pragma omp simd
            for (i64 p = 0; p < pairs; p++) {
                const float even = from[split + 2 * p], odd = from[split + 2 * p + 1], sine = sign * s[p];
                to[split + 2 * p] = even * c[p] - odd * sine;
                to[split + 2 * p + 1] = even * sine + odd * c[p];
            }
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

enum { LINEAR_COLUMNS = 16 };  // of one work item

EXPORT int linear(const float *x, i64 stride, const float *weight, i64 n, i64 k, i64 columns, float *out) {
    const float **rows = malloc((n + 1) * sizeof *rows);
    if (!rows) return 1;
    for (i64 i = 0; i < n; i++) rows[i] = x + i * stride;
#pragma omp parallel for if (n * k * columns > PARALLEL_WORK)
    for (i64 c = 0; c < columns; c += LINEAR_COLUMNS)
        dots(rows, n, weight + c * k, k, MIN(LINEAR_COLUMNS, columns - c), k, out + c, columns);
    free(rows);
    return 0;
}
