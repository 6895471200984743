// mHC: post-mix of one sub-layer, coefficients and pre-mix of the next, and its RMSNorm, six rows at a time.
#include "common.h"

enum { MAX_HC = 8, ROWS = 6 };

static void post_mix(const float *h, const float *y, const float *post, const float *comb, i64 hc, i64 dim, float *out) {
    for (i64 j = 0; j < hc; j++) {
        float *to = out + j * dim;
        const float p = post[j];
        if (hc == 4) {
            const float c0 = comb[j], c1 = comb[4 + j], c2 = comb[8 + j], c3 = comb[12 + j];
#pragma omp simd
            for (i64 d = 0; d < dim; d++)
                to[d] = p * y[d] + (c0 * h[d] + c1 * h[dim + d] + c2 * h[2 * dim + d] + c3 * h[3 * dim + d]);
            continue;
        }
        for (i64 d = 0; d < dim; d++) to[d] = p * y[d];
        for (i64 i = 0; i < hc; i++)
#pragma omp simd
            for (i64 d = 0; d < dim; d++) to[d] += comb[i * hc + j] * h[i * dim + d];
    }
}

static void sinkhorn(float *c, i64 hc, int iterations, float eps) {
    for (int step = 0; step < iterations; step++) {
        for (i64 i = 0; step && i < hc; i++) {  // the softmax was the first row step
            float s = eps;
            for (i64 j = 0; j < hc; j++) s += c[i * hc + j];
            const float inverse = 1.0f / s;
            for (i64 j = 0; j < hc; j++) c[i * hc + j] *= inverse;
        }
        float s[MAX_HC];
        for (i64 j = 0; j < hc; j++) s[j] = eps;
        for (i64 i = 0; i < hc; i++)
            for (i64 j = 0; j < hc; j++) s[j] += c[i * hc + j];
        for (i64 j = 0; j < hc; j++) s[j] = 1.0f / s[j];
        for (i64 i = 0; i < hc; i++)
            for (i64 j = 0; j < hc; j++) c[i * hc + j] *= s[j];
    }
}

// The same for hc = 4, a row a vector: one permutation a sum instead of four loads.
typedef float vec4 __attribute__((vector_size(16)));
#ifdef __clang__
#define PERMUTE4(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
typedef int32_t ivec4 __attribute__((vector_size(16)));
#define PERMUTE4(v, ...) __builtin_shuffle(v, (ivec4){__VA_ARGS__})
#endif
INLINE vec4 sum4(vec4 v) {
    v += PERMUTE4(v, 1, 0, 3, 2);
    return v + PERMUTE4(v, 2, 3, 0, 1);
}
static void sinkhorn4(float *c, int iterations, float eps) {
    vec4 row[4];
    memcpy(row, c, sizeof row);
    for (int step = 0; step < iterations; step++) {
        for (int i = 0; step && i < 4; i++) row[i] /= sum4(row[i]) + eps;
        const vec4 inverse = 1.0f / ((row[0] + row[1]) + (row[2] + row[3]) + eps);
        for (int i = 0; i < 4; i++) row[i] *= inverse;
    }
    memcpy(c, row, sizeof row);
}

static void coefficients(const float *u, float norm, const float *scale, const float *base, i64 hc, int iterations,
                         float eps, float *pre, float *post, float *comb) {
    for (i64 i = 0; i < hc; i++) {
        pre[i] = sigmoid(u[i] * norm * scale[0] + base[i]) + eps;
        post[i] = 2.0f * sigmoid(u[hc + i] * norm * scale[1] + base[hc + i]);
    }
    for (i64 i = 0; i < hc; i++) {
        float *row = comb + i * hc, top = -INFINITY, total = 0;
        for (i64 j = 0; j < hc; j++) {
            const i64 at = 2 * hc + i * hc + j;
            row[j] = u[at] * norm * scale[2] + base[at];
            top = MAX(top, row[j]);
        }
        for (i64 j = 0; j < hc; j++) total += row[j] = fast_exp(row[j] - top);
        for (i64 j = 0; j < hc; j++) row[j] = row[j] / total + eps;
    }
    if (hc == 4) sinkhorn4(comb, iterations, eps);
    else sinkhorn(comb, hc, iterations, eps);
}

EXPORT void hc_post(const float *h, const float *y, const float *post, const float *comb, i64 n, i64 hc, i64 dim,
                    float *out) {
#pragma omp parallel for if (n * hc * hc * dim > PARALLEL_WORK)
    for (i64 i = 0; i < n; i++)
        post_mix(h + i * hc * dim, y + i * dim, post + i * hc, comb + i * hc * hc, hc, dim, out + i * hc * dim);
}

// y NULL: no post-mix, h is used as it is and h_out is not written.
EXPORT void hc_post_pre(const float *h, const float *y, const float *post_in, const float *comb_in, const float *p_prev,
                        const float *fn, const float *scale, const float *base, const float *norm_weight, i64 n, i64 hc,
                        i64 dim, int iterations, float hc_eps, float rms_eps, float *h_out, float *x, float *pre,
                        float *post, float *comb) {
    const i64 width = hc * dim, mixes = hc * (2 + hc);
#pragma omp parallel for if (n * width * mixes > PARALLEL_WORK)
    for (i64 start = 0; start < n; start += ROWS) {
        const i64 rows = MIN(ROWS, n - start);
        const float *z[ROWS];
        float u[ROWS * MAX_HC * (2 + MAX_HC)];
        for (i64 r = 0; r < rows; r++) {
            const i64 i = start + r;
            z[r] = h + i * width;
            if (y) {
                post_mix(z[r], y + i * dim, post_in + i * hc, comb_in + i * hc * hc, hc, dim, h_out + i * width);
                z[r] = h_out + i * width;
            }
        }
        dots(z, rows, fn, width, mixes, width, u, mixes);
        for (i64 r = 0; r < rows; r++) {
            const i64 i = start + r;
            const float norm = 1.0f / sqrtf(sum_squares(z[r], width) / width + rms_eps);
            coefficients(u + r * mixes, norm, scale, base, hc, iterations, hc_eps, pre + i * hc, post + i * hc,
                         comb + i * hc * hc);
            float *to = x + i * dim;
            const float *p = p_prev + i * hc;
#pragma omp simd
            for (i64 d = 0; d < dim; d++) to[d] = p[0] * z[r][d];
            for (i64 j = 1; j < hc; j++)
#pragma omp simd
                for (i64 d = 0; d < dim; d++) to[d] += p[j] * z[r][j * dim + d];
            scale_rows(to, norm_weight, 1.0f / sqrtf(sum_squares(to, dim) / dim + rms_eps), dim, to);
        }
    }
}
