// Lightning indexer: scores through block tables, top-k by radix selection, candidate blocks.
#include "rows.h"

enum { KEY_TILE = 32, KEY_CHUNK = 256, ROW_BLOCK = 16 };

EXPORT int index_scores(const float *iq, const float *weights, i64 n, i64 heads, i64 dim,  //
                        const void *cache, i64 entries, i64 page_stride, i64 row_stride, int kind,
                        const int32_t *tables, i64 max_blocks, const int32_t *sequence_of_row, const int32_t *visible,
                        i64 width, float *out) {
    const Rows rows = {cache, entries, page_stride, row_stride, kind};
    // Neighbouring rows of one sequence share the decoded keys.
    i64 *starts = malloc((n + 1) * sizeof *starts), blocks = 0;
    if (!starts) return 1;
    for (i64 i = 0; i < n; i++)
        if (!blocks || i - starts[blocks - 1] == ROW_BLOCK || sequence_of_row[i] != sequence_of_row[i - 1])
            starts[blocks++] = i;
    starts[blocks] = n;
    const i64 chunks = (width + KEY_CHUNK - 1) / KEY_CHUNK;
    int failed = 0;
#pragma omp parallel if (n * width * heads * dim > PARALLEL_WORK)
    {
        float *buffer = malloc(KEY_TILE * (dim + heads) * sizeof(float)), *keys = buffer, *dot = buffer + KEY_TILE * dim;
        const float **queries = malloc(heads * sizeof *queries);
        if (!buffer || !queries) failed = 1;
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
        for (i64 item = 0; item < blocks * chunks; item++) {
            if (failed) continue;
            const i64 start = starts[item / chunks], end = starts[item / chunks + 1];
            const i64 from = item % chunks * KEY_CHUNK, to = MIN(from + KEY_CHUNK, width);
            const int32_t *table = tables + sequence_of_row[start] * max_blocks;
            i64 count = 0;
            for (i64 i = start; i < end; i++) count = MAX(count, visible[i]);
            for (i64 tile = from; tile < to; tile += KEY_TILE) {
                const int size = (int)MIN(KEY_TILE, to - tile), used = (int)MAX(0, MIN(size, count - tile));
                for (int t = 0; t < used; t++) {
                    const i64 g = tile + t;
                    decode_row(kind, row_at(&rows, table[g / entries] * entries + g % entries), dim, keys + t * dim);
                }
                for (i64 i = start; i < end; i++) {
                    float *score = out + i * width + tile;
                    const int seen = (int)MAX(0, MIN(used, visible[i] - tile));
                    for (i64 h = 0; h < heads; h++) queries[h] = iq + (i * heads + h) * dim;
                    dots(queries, heads, keys, dim, seen, dim, dot, KEY_TILE);
                    for (int t = 0; t < size; t++) score[t] = t < seen ? 0 : -INFINITY;
                    for (i64 h = 0; h < heads; h++) {
                        const float w = weights[i * heads + h];
#pragma omp simd
                        for (int t = 0; t < seen; t++) score[t] += w * MAX(dot[h * KEY_TILE + t], 0.0f);
                    }
                }
            }
        }
        free(buffer);
        free(queries);
    }
    free(starts);
    return failed;
}

// Unsigned order of floats: a < b exactly when key(a) < key(b); -0 equals 0, NaN is below -inf.
INLINE uint32_t order_key(float x) {
    const uint32_t u = as_bits(x + 0.0f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0;
    return u ^ (u >> 31 ? 0xffffffffu : 0x80000000u);
}

// The k-th largest key and how many of the elements equal to it belong to the k largest.
static uint32_t kth_largest(const float *x, i64 n, i64 k, i64 *ties) {
    uint32_t prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        i64 histogram[256] = {0};
        const uint32_t mask = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
        for (i64 i = 0; i < n; i++) {
            const uint32_t key = order_key(x[i]);
            if ((key & mask) == prefix) histogram[key >> shift & 255]++;
        }
        int digit = 255;
        for (; digit > 0 && histogram[digit] < k; digit--) k -= histogram[digit];
        prefix |= (uint32_t)digit << shift;
    }
    *ties = k;
    return prefix;
}

EXPORT void top_k_positions(const float *scores, i64 n, i64 width, i64 k, int32_t *out) {
    const uint32_t lowest = order_key(-INFINITY);
#pragma omp parallel for if (n * width * 8 > PARALLEL_WORK)
    for (i64 i = 0; i < n; i++) {
        const float *row = scores + i * width;
        int32_t *to = out + i * k;
        i64 count = 0, ties = width;
        const uint32_t threshold = width > k && k > 0 ? kth_largest(row, width, k, &ties) : 0;
        for (i64 g = 0; g < width && count < k; g++) {
            const uint32_t key = order_key(row[g]);
            if (key <= lowest || key < threshold || (key == threshold && ties-- <= 0)) continue;
            to[count++] = (int32_t)g;
        }
        for (; count < k; count++) to[count] = -1;
    }
}

// kept must be zeroed.
EXPORT int candidate_blocks(const float *scores, const int32_t *visible, i64 n, i64 width, i64 block_size, i64 top_blocks,
                            uint8_t *kept) {
    const i64 blocks = (width + block_size - 1) / block_size;
    int failed = 0;
#pragma omp parallel if (n * width > PARALLEL_WORK)
    {
        float *best = malloc(blocks * sizeof(float));
        int32_t *chosen = malloc(top_blocks * sizeof *chosen);
        if (!best || !chosen) failed = 1;
#pragma omp barrier
#pragma omp for
        for (i64 i = 0; i < n; i++) {
            if (failed) continue;
            for (i64 b = 0; b < blocks; b++) {
                best[b] = -INFINITY;
                for (i64 g = b * block_size; g < MIN((b + 1) * block_size, width); g++)
                    best[b] = MAX(best[b], scores[i * width + g]);
            }
            best[visible[i] > 0 ? (visible[i] - 1) / block_size : 0] = visible[i] > 0 ? INFINITY : -INFINITY;
            top_k_positions(best, 1, blocks, top_blocks, chosen);
            for (i64 c = 0; c < top_blocks && chosen[c] >= 0; c++) kept[i * blocks + chosen[c]] = 1;
        }
        free(best);
        free(chosen);
    }
    return failed;
}

EXPORT void mask_to_candidates(const float *scores, const uint8_t *kept, i64 n, i64 width, i64 block_size, float *out) {
    const i64 blocks = (width + block_size - 1) / block_size;
#pragma omp parallel for if (n * width > PARALLEL_WORK)
    for (i64 i = 0; i < n; i++)
        for (i64 b = 0; b < blocks; b++)
            for (i64 g = b * block_size; g < MIN((b + 1) * block_size, width); g++)
                out[i * width + g] = kept[i * blocks + b] ? scores[i * width + g] : -INFINITY;
}
