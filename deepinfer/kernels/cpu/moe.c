// Mixture of experts: gate, and the routed experts over float32 or packed FP4 weights (spec: model, section 6).
#include "products.h"

void fp8_round_trip(const float *x, i64 n, float *out);

EXPORT int moe_gate(const float *logits, const float *bias, i64 bias_stride, i64 n, i64 experts, i64 k, int normalise,
                    float scaling, int32_t *chosen, float *gates) {
    int failed = 0;
#pragma omp parallel if (n * experts * 32 > PARALLEL_WORK)
    {
        float *scores = malloc(2 * experts * sizeof(float)), *ranked = scores + experts;
        if (!scores) failed = 1;
#pragma omp barrier
#pragma omp for
        for (i64 i = 0; i < n; i++) {
            if (failed) continue;
            for (i64 e = 0; e < experts; e++) {
                const float x = logits[i * experts + e];
                scores[e] = sqrtf(x > 20.0f ? x : log1pf(expf(x)));
                ranked[e] = scores[e] + bias[i * bias_stride + e];
            }
            float total = 1e-20f;
            for (i64 j = 0; j < k; j++) {
                i64 best = 0;
                for (i64 e = 1; e < experts; e++) best = ranked[e] > ranked[best] ? e : best;
                ranked[best] = -INFINITY;
                chosen[i * k + j] = (int32_t)best;
                total += gates[i * k + j] = scores[best];
            }
            for (i64 j = 0; j < k; j++) gates[i * k + j] *= scaling / (normalise ? total : 1.0f);
        }
        free(scores);
    }
    return failed;
}

enum { COLUMNS = 16 };  // output columns of one work item

// gate * silu(min(g, limit)) * clamp(u) of one token-expert pair, for columns [first, first + count).
static void activate(const float *g, const float *u, float gate, float limit, i64 count, float *z) {
#pragma omp simd
    for (i64 j = 0; j < count; j++) {
        const float x = MIN(limit, g[j]);
        z[j] = gate * (x * sigmoid(x) * MIN(limit, MAX(-limit, u[j])));
    }
}

EXPORT int moe_experts(const float *x, const int32_t *chosen, const float *gates, i64 n, i64 k, i64 experts, i64 dim,
                       i64 inner, const void *w13_values, const uint8_t *w13_scales, const void *w2_values,
                       const uint8_t *w2_scales, float limit, int quantize, float *out) {
    const Weight w13 = {w13_scales ? ROW_MXFP4 : ROW_F32, w13_values, w13_scales, dim};
    const Weight w2 = {w2_scales ? ROW_MXFP4 : ROW_F32, w2_values, w2_scales, inner};
    const i64 pairs = n * k, up_blocks = (inner + COLUMNS - 1) / COLUMNS, down_blocks = (dim + COLUMNS - 1) / COLUMNS;
    // Pairs sorted by expert, rows ascending: pair p of the order is token token[p], weighted gate[p].
    i64 *first = calloc(experts + 1, sizeof *first), *token = malloc((pairs + 1) * sizeof *token);
    const float **rows = malloc((pairs + 1) * sizeof *rows), **z_rows = malloc((pairs + 1) * sizeof *z_rows);
    float *gate = malloc((pairs + 1) * sizeof *gate), *z = malloc((pairs * inner + 1) * sizeof *z);
    float *source = quantize ? malloc((n * dim + 1) * sizeof *source) : NULL;
    int failed = !first || !token || !rows || !z_rows || !gate || !z || (quantize && !source);
    const i64 used = failed ? 0 : pairs;
    if (!failed) {
        i64 *next = first;  // counts, then starts, then ends
        for (i64 p = 0; p < pairs; p++) next[chosen[p]]++;
        for (i64 e = 0, start = 0; e <= experts; e++) {
            const i64 count = next[e];
            next[e] = start;
            start += count;
        }
        for (i64 p = 0; p < pairs; p++) {
            const i64 at = next[chosen[p]]++;
            token[at] = p / k;
            gate[at] = gates[p];
        }
        for (i64 e = experts; e > 0; e--) first[e] = first[e - 1];
        first[0] = 0;
        for (i64 p = 0; p < pairs; p++) {
            rows[p] = (source ? source : x) + token[p] * dim;
            z_rows[p] = z + p * inner;
        }
    }
    memset(out, 0, (size_t)(n * dim) * sizeof(float));
#pragma omp parallel if (used * inner * dim > PARALLEL_WORK)
    {
        const i64 widest = MAX(dim, inner);
        i64 most = 0;
        for (i64 e = 0; e < experts && used; e++) most = MAX(most, first[e + 1] - first[e]);
        float *buffer = malloc((COLUMNS * widest + 1) * sizeof(float));
        float *result = malloc((2 * COLUMNS * most + 1) * sizeof(float));
        if (!buffer || !result) failed = 1;
#pragma omp barrier
        if (quantize && !failed) {
#pragma omp for
            for (i64 i = 0; i < n; i++) fp8_round_trip(x + i * dim, dim, source + i * dim);
        }
#pragma omp for schedule(dynamic, 1)
        for (i64 item = 0; item < (failed ? 0 : experts * up_blocks); item++) {
            const i64 e = item / up_blocks, column = item % up_blocks * COLUMNS, start = first[e];
            const i64 count = first[e + 1] - start, width = MIN(COLUMNS, inner - column);
            if (!count) continue;
            float *up = result + count * COLUMNS;
            const i64 row = e * 2 * inner + column;  // of the gate's columns; those of `up` lie `inner` behind
            products(rows + start, count, &w13, row, width, result, COLUMNS, buffer);
            products(rows + start, count, &w13, row + inner, width, up, COLUMNS, buffer);
            for (i64 p = 0; p < count; p++)
                activate(result + p * COLUMNS, up + p * COLUMNS, gate[start + p], limit, width,
                         z + (start + p) * inner + column);
        }
        if (quantize && !failed) {
#pragma omp for
            for (i64 p = 0; p < used; p++) fp8_round_trip(z + p * inner, inner, z + p * inner);
        }
#pragma omp for schedule(dynamic, 1)
        for (i64 block = 0; block < (failed ? 0 : down_blocks); block++) {
            const i64 column = block * COLUMNS, width = MIN(COLUMNS, dim - column);
            for (i64 e = 0; e < experts; e++) {
                const i64 start = first[e], count = first[e + 1] - start;
                if (!count) continue;
                products(z_rows + start, count, &w2, e * dim + column, width, result, COLUMNS, buffer);
                for (i64 p = 0; p < count; p++)
                    for (i64 c = 0; c < width; c++) out[token[start + p] * dim + column + c] += result[p * COLUMNS + c];
            }
        }
        free(buffer);
        free(result);
    }
    free(first);
    free(token);
    free(rows);
    free(z_rows);
    free(gate);
    free(z);
    free(source);
    return failed;
}
