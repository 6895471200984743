// Sparse attention over window and latent rows, one online softmax (spec: model, section 5). Keys are decoded once for
// all heads, TILE at a time. Every SPAN keys are a part of their own, and the parts are added up in order: so a result
// depends neither on the number of threads, over which few queries spread their parts, nor on the batch.
#include "rows.h"

enum { TILE = 16, SPAN = 64 };

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

// The keys of one call: slots [n, window_count] and [n, latent_count], -1 for none.
typedef struct {
    Rows window, latent;
    const int32_t *window_slots, *latent_slots;
    i64 window_count, latent_count;
} Keys;

// Query i over its keys [first, last): `part` is overwritten. keys [TILE, dim] and logits [heads, TILE] are scratch.
static void attend_span(const Keys *all, i64 i, i64 first, i64 last, const float *const *q, i64 heads, i64 dim,
                        float scale, const float *sink, Part *part, float *keys, float *logits) {
    memcpy(part->top, sink, heads * sizeof(float));
    memset(part->total, 0, (heads + heads * dim) * sizeof(float));
    int count = 0;
    for (i64 k = first; k < last; k++) {
        const int in_window = k < all->window_count;
        const i64 slot = in_window ? all->window_slots[i * all->window_count + k]
                                   : all->latent_slots[i * all->latent_count + k - all->window_count];
        const Rows *rows = in_window ? &all->window : &all->latent;
        if (slot >= 0) decode_row(rows->kind, row_at(rows, slot), dim, keys + count++ * dim);
        if (count == TILE || (count && k + 1 == last)) {
            attend_tile(q, heads, dim, keys, count, scale, part, logits);
            count = 0;
        }
    }
}

static Part part_at(float *state, i64 heads) { return (Part){state, state + heads, state + 2 * heads}; }

static void add_part(const Part *part, i64 heads, i64 dim, const Part *sum) {
    for (i64 h = 0; h < heads; h++) {
        const float top = MAX(sum->top[h], part->top[h]);
        const float keep = fast_exp(sum->top[h] - top), factor = fast_exp(part->top[h] - top);
        sum->top[h] = top;
        sum->total[h] = sum->total[h] * keep + part->total[h] * factor;
#pragma omp simd
        for (i64 d = 0; d < dim; d++) sum->acc[h * dim + d] = sum->acc[h * dim + d] * keep + part->acc[h * dim + d] * factor;
    }
}

static void divide(const Part *sum, i64 heads, i64 dim, const float *sink, float *out) {
    for (i64 h = 0; h < heads; h++) {
        const float factor = 1.0f / (sum->total[h] + fast_exp(sink[h] - sum->top[h]));
#pragma omp simd
        for (i64 d = 0; d < dim; d++) out[h * dim + d] = sum->acc[h * dim + d] * factor;
    }
}

EXPORT int sparse_attention(const float *q, i64 n, i64 heads, i64 dim,  //
                            const void *window, i64 window_page, i64 window_page_stride, i64 window_row_stride,
                            int window_kind, const int32_t *window_slots, i64 window_count,  //
                            const void *latent, i64 latent_page, i64 latent_page_stride, i64 latent_row_stride,
                            int latent_kind, const int32_t *latent_slots, i64 latent_count,  //
                            const float *sink, float scale, float *out) {
    const Keys all = {{window, window_page, window_page_stride, window_row_stride, window_kind},
                      {latent, latent_page, latent_page_stride, latent_row_stride, latent_kind},
                      window_slots, latent_slots, window_count, latent_count};
    const i64 num_keys = window_count + latent_count, state = heads * (dim + 2);
    const i64 parts = MAX(1, (num_keys + SPAN - 1) / SPAN);
    const int parallel = n * num_keys * heads * dim > PARALLEL_WORK;
    const i64 shares = parallel && n < THREADS ? parts : 1;  // work items of a query
    float *states = shares > 1 ? malloc((size_t)(n * parts * state) * sizeof(float)) : NULL;
    int failed = shares > 1 && !states;
#pragma omp parallel if (parallel)
    {
        float *buffer = malloc((TILE * dim + TILE * heads + 2 * state) * sizeof(float));
        float *keys = buffer, *logits = keys + TILE * dim, *own = logits + TILE * heads;
        const float **queries = malloc(heads * sizeof *queries);
        if (!buffer || !queries) failed = 1;
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
        for (i64 item = 0; item < n * shares; item++) {
            if (failed) continue;
            const i64 i = item / shares, begin = item % shares, end = shares > 1 ? begin + 1 : parts;
            const Part sum = part_at(shares > 1 ? states + item * state : own, heads);
            for (i64 h = 0; h < heads; h++) queries[h] = q + (i * heads + h) * dim;
            for (i64 p = begin; p < end; p++) {
                Part part = p == begin ? sum : part_at(own + state, heads);
                attend_span(&all, i, p * SPAN, MIN((p + 1) * SPAN, num_keys), queries, heads, dim, scale, sink, &part, keys,
                            logits);
                if (p > begin) add_part(&part, heads, dim, &sum);
            }
            if (shares == 1) divide(&sum, heads, dim, sink, out + i * heads * dim);
        }
        free(buffer);
        free(queries);
    }
    for (i64 i = 0; shares > 1 && !failed && i < n; i++) {
        const Part sum = part_at(states + i * parts * state, heads);
        for (i64 p = 1; p < parts; p++) {
            const Part part = part_at(states + (i * parts + p) * state, heads);
            add_part(&part, heads, dim, &sum);
        }
        divide(&sum, heads, dim, sink, out + i * heads * dim);
    }
    free(states);
    return failed;
}
