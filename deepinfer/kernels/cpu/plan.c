// Addresses in paged caches, the plan of a decode step, and the pooling of token groups (spec: model, section 5).
#include "common.h"

EXPORT void entry_slots(const int32_t *positions, i64 n, i64 k, const int32_t *tables, i64 stride, const int32_t *owner,
                        i64 entries, int32_t *out) {
    for (i64 i = 0; i < n; i++) {
        const int32_t *table = tables + owner[i] * stride, size = (int32_t)entries;
        for (i64 j = 0; j < k; j++) {
            const int32_t at = positions[i * k + j];
            out[i * k + j] = at < 0 ? -1 : table[at / size] * size + at % size;
        }
    }
}

INLINE i64 wrapped(i64 at, i64 size) { return at % size < 0 ? at % size + size : at % size; }

// Where the token `back` before row i's is: a new row of this step, or one of `size` kept ones.
INLINE i64 source(const i64 *positions, const i64 *states, i64 n, i64 i, i64 back, i64 size) {
    const int is_new = i >= back && states[i - back] == states[i] && positions[i - back] == positions[i] - back;
    return is_new ? i - back : n + i * size + wrapped(positions[i] - back, size);
}

// The integers of `decode_plan` in kernels/reference/step.py, which says what they are.
EXPORT void decode_plan(const i64 *positions, const i64 *states, const int32_t *tables, i64 table_stride, i64 n, i64 ratio,
                        i64 block_size, i64 window, i64 ring, i64 ngram, i64 carry, i64 history, int32_t *window_slots,
                        i64 *sources, i64 *members, i64 *slots, int32_t *visible) {
    for (i64 i = 0; i < n; i++) {
        const i64 at = positions[i], group = at / ratio, entries = block_size / ratio;
        const int complete = at % ratio == ratio - 1;
        const int32_t *table = tables + i * table_stride;
        for (i64 w = 0; w < window; w++) {
            const i64 token = at + 1 - window + w;
            window_slots[i * window + w] = (int32_t)(token < 0 ? -1 : states[i] * ring + token % ring);
        }
        sources[i * ngram] = i;
        for (i64 back = 1; back < ngram; back++)
            sources[i * ngram + back] = at < back ? n * (1 + history) : source(positions, states, n, i, back, history);
        for (i64 back = 0; back < ratio; back++)
            members[i * ratio + ratio - 1 - back] = back ? source(positions, states, n, i, back, carry) : i;
        const i64 of_row[7] = {states[i],
                               states[i] * ring + at % ring,
                               table[at / block_size] * block_size + at % block_size,
                               complete ? table[group / entries] * entries + group % entries : 0,
                               complete ? 0 : states[i],
                               at % carry,
                               at % history};
        for (i64 s = 0; s < 7; s++) slots[s * n + i] = of_row[s];
        visible[i] = (int32_t)(at + 1);
        visible[n + i] = (int32_t)(group + complete);
    }
}

// ab [n, 2, d]: values and gates of new tokens; carry: those of `places` earlier ones of each state, `carry_stride` floats
// from state to state; members [groups, ratio] into [n new rows | sequences * places carried ones].
EXPORT void pool_groups(const float *ab, i64 n, float *carry, i64 carry_stride, i64 places, const i64 *states, i64 d,
                        const i64 *members, i64 groups, i64 ratio, const i64 *pending_rows, const i64 *pending_slots,
                        const i64 *pending_places, i64 pending, float *out) {
#pragma omp parallel for if (groups * ratio * d * 8 > PARALLEL_WORK)
    for (i64 g = 0; g < groups; g++) {
        const float *rows[ratio];
        for (i64 r = 0; r < ratio; r++) {
            const i64 member = members[g * ratio + r], kept = member - n;
            rows[r] = member < n ? ab + member * 2 * d : carry + states[kept / places] * carry_stride + kept % places * 2 * d;
        }
        for (i64 j = 0; j < d; j++) {
            float most = rows[0][d + j], total = 0, sum = 0;
            for (i64 r = 1; r < ratio; r++) most = MAX(most, rows[r][d + j]);
            for (i64 r = 0; r < ratio; r++) {
                const float weight = expf(rows[r][d + j] - most);
                total += weight;
                sum += weight * rows[r][j];
            }
            out[g * d + j] = sum / total;
        }
    }
    for (i64 p = 0; p < pending; p++)
        memcpy(carry + pending_slots[p] * carry_stride + pending_places[p] * 2 * d, ab + pending_rows[p] * 2 * d,
               2 * d * sizeof(float));
}
