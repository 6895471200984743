// apply_token_bitmask.
#include "common.h"

EXPORT void apply_token_bitmask(const float *logits, i64 stride, const uint32_t *mask, i64 mask_stride, i64 n, i64 vocab,
                                float *out) {
    for (i64 i = 0; i < n; i++) {
        const float *from = logits + i * stride;
        float *to = out + i * vocab;
        for (i64 start = 0; start < vocab; start += 32) {
            const uint32_t word = mask[i * mask_stride + start / 32];
            const i64 count = MIN(vocab - start, 32);
#pragma omp simd
            for (i64 b = 0; b < count; b++) to[start + b] = (word >> b & 1) ? from[start + b] : -INFINITY;
        }
    }
}
