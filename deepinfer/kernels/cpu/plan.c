// Addresses in paged caches, and the pooling of token groups (spec: model, section 5).
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
