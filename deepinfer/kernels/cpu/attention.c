// Sparse attention over window and latent rows, one online softmax (spec: model, section 5). Keys are decoded once for
// all heads, TILE at a time. A single query splits its keys over the threads; the parts are merged at the end.
#include "rows.h"

enum { TILE = 16, MIN_KEYS_A_PART = 64 };

typedef struct {
    float *top, *total, *acc;  // [H], [H], [H, d]: running maximum, sum of exponentials, weighted sum
} Part;

// acc[h] += sum_t p[h, t] * keys[t]
INLINE void add_values(const int H, const float *p, const float *keys, int count, i64 dim, float *acc) {
    i64 d = 0;
    for (; d + LANES <= dim; d += LANES) {
        vec a[4];
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) a[h] = load(acc + h * dim + d);
        for (int t = 0; t < count; t++) {
            const vec key = load(keys + t * dim + d);
#pragma GCC unroll 4
            for (int h = 0; h < H; h++) a[h] += p[h * TILE + t] * key;
        }
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) store(acc + h * dim + d, a[h]);
    }
    for (; d < dim; d++)
        for (int h = 0; h < H; h++)
            for (int t = 0; t < count; t++) acc[h * dim + d] += p[h * TILE + t] * keys[t * dim + d];
}

static void attend_tile(const float *const *q, i64 heads, i64 dim, const float *keys, int count, float scale, Part *part,
                        float *logits) {
    dots(q, heads, keys, dim, count, dim, logits, TILE);
    for (i64 h = 0; h < heads; h++) {
        float *row = logits + h * TILE, top = part->top[h], total = 0;
#pragma omp simd reduction(max : top)  // over whole tiles, so that a head is a few vectors
        for (int t = 0; t < TILE; t++) {
            row[t] = t < count ? row[t] * scale : -INFINITY;
            top = MAX(top, row[t]);
        }
        if (top > part->top[h]) {
            const float shrink = fast_exp(part->top[h] - top);
            part->top[h] = top;
            part->total[h] *= shrink;
#pragma omp simd
            for (i64 d = 0; d < dim; d++) part->acc[h * dim + d] *= shrink;
        }
#pragma omp simd reduction(+ : total)
        for (int t = 0; t < TILE; t++) {
            row[t] = t < count ? fast_exp(row[t] - top) : 0;
            total += row[t];
        }
        part->total[h] += total;
    }
    i64 h = 0;
    for (; h + 4 <= heads; h += 4) add_values(4, logits + h * TILE, keys, count, dim, part->acc + h * dim);
    for (; h < heads; h++) add_values(1, logits + h * TILE, keys, count, dim, part->acc + h * dim);
}

// out[h] = sum of the parts' weighted sums / (their totals + exp(sink)), all against the common maximum.
static void merge_parts(const float *states, i64 parts, i64 heads, i64 dim, const float *sink, float *out) {
    const i64 state = heads * (dim + 2);
    for (i64 h = 0; h < heads; h++) {
        float *to = out + h * dim, top = sink[h];
        for (i64 p = 0; p < parts; p++) top = MAX(top, states[p * state + h]);
        float total = fast_exp(sink[h] - top);
        for (i64 p = 0; p < parts; p++)
            total += states[p * state + heads + h] * fast_exp(states[p * state + h] - top);
        for (i64 p = 0; p < parts; p++) {
            const float factor = fast_exp(states[p * state + h] - top) / total;
            const float *acc = states + p * state + 2 * heads + h * dim;
#pragma omp simd
            for (i64 d = 0; d < dim; d++) to[d] = (p ? to[d] : 0) + acc[d] * factor;
        }
    }
}

EXPORT int sparse_attention(const float *q, i64 n, i64 heads, i64 dim,  //
                            const void *window, i64 window_page, i64 window_page_stride, i64 window_row_stride,
                            int window_kind, const int32_t *window_slots, i64 window_count,  //
                            const void *latent, i64 latent_page, i64 latent_page_stride, i64 latent_row_stride,
                            int latent_kind, const int32_t *latent_slots, i64 latent_count,  //
                            const float *sink, float scale, float *out) {
    const Rows caches[2] = {{window, window_page, window_page_stride, window_row_stride, window_kind},
                            {latent, latent_page, latent_page_stride, latent_row_stride, latent_kind}};
    const i64 keys_a_row = window_count + latent_count, state = heads * (dim + 2);
    const int parallel = n * keys_a_row * heads * dim > PARALLEL_WORK;
    i64 parts = 1;
    if (parallel && n < THREADS) parts = MAX(1, MIN((THREADS + n - 1) / n, keys_a_row / MIN_KEYS_A_PART));
    const i64 span = (keys_a_row + parts - 1) / parts;
    float *states = parts > 1 ? malloc((size_t)(n * parts * state) * sizeof(float)) : NULL;
    int failed = parts > 1 && !states;
#pragma omp parallel if (parallel)
    {
        float *buffer = malloc((TILE * dim + TILE * heads + state) * sizeof(float));
        float *keys = buffer, *logits = keys + TILE * dim, *own_state = logits + TILE * heads;
        const float **queries = malloc(heads * sizeof *queries);
        if (!buffer || !queries) failed = 1;
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
        for (i64 item = 0; item < n * parts; item++) {
            if (failed) continue;
            const i64 i = item / parts, first = item % parts * span, last = MIN(first + span, keys_a_row);
            float *s = parts > 1 ? states + item * state : own_state;
            Part part = {s, s + heads, s + 2 * heads};
            for (i64 h = 0; h < heads; h++) {
                queries[h] = q + (i * heads + h) * dim;
                part.top[h] = sink[h];
            }
            memset(part.total, 0, (heads + heads * dim) * sizeof(float));
            int count = 0;
            for (i64 k = first; k < last; k++) {
                const int of = k >= window_count;
                const i64 slot = of ? latent_slots[i * latent_count + k - window_count] : window_slots[i * window_count + k];
                if (slot >= 0) decode_row(caches[of].kind, row_at(&caches[of], slot), dim, keys + count++ * dim);
                if (count == TILE || (count && k + 1 == last)) {
                    attend_tile(queries, heads, dim, keys, count, scale, &part, logits);
                    count = 0;
                }
            }
            if (parts == 1) merge_parts(s, 1, heads, dim, sink, out + i * heads * dim);
        }
        free(buffer);
        free(queries);
    }
    for (i64 i = 0; parts > 1 && !failed && i < n; i++)
        merge_parts(states + i * parts * state, parts, heads, dim, sink, out + i * heads * dim);
    free(states);
    return failed;
}
