// Engram: n-gram hash ids and the gate into the streams (spec: model, section 4).
#include "common.h"

EXPORT void engram_hash(const i64 *history, const i64 *multipliers, const i64 *primes, const i64 *offsets, i64 pad, i64 n,
                        i64 length, i64 heads, i64 *out) {
    for (i64 i = 0; i < n; i++) {
        int blocked = 0;
        uint64_t running = 0;  // products may wrap, as they do in int64 tensors
        for (i64 step = 0; step < length; step++) {
            const i64 id = history[i * length + step];
            blocked |= id < 0;
            running ^= (uint64_t)(blocked ? pad : id) * (uint64_t)multipliers[step];
            for (i64 head = 0; step > 0 && head < heads; head++) {
                const i64 at = (step - 1) * heads + head, rest = (i64)running % primes[at];
                out[i * (length - 1) * heads + at] = (rest < 0 ? rest + primes[at] : rest) + offsets[at];
            }
        }
    }
}

EXPORT void engram_gate(const float *h, const float *kv, const float *weight, const uint8_t *alive, float eps, i64 n,
                        i64 hc, i64 dim, float *out) {
#pragma omp parallel for if (n * hc * dim * 4 > PARALLEL_WORK)
    for (i64 i = 0; i < n; i++) {
        const float *value = kv + i * (hc + 1) * dim + hc * dim;
        for (i64 j = 0; j < hc; j++) {
            const float *stream = h + (i * hc + j) * dim, *key = kv + i * (hc + 1) * dim + j * dim, *w = weight + j * dim;
            float dot = 0;
#pragma omp simd reduction(+ : dot)
            for (i64 d = 0; d < dim; d++) dot += stream[d] * w[d] * key[d];
            const float mean_h = sum_squares(stream, dim) / dim + eps, mean_key = sum_squares(key, dim) / dim + eps;
            dot = dot / (sqrtf(mean_h) * sqrtf(mean_key)) / sqrtf((float)dim);
            const float strength = sigmoid(copysignf(sqrtf(MAX(1e-6f, fabsf(dot))), dot));
            const float gate = alive && !alive[i] ? 0 : strength;
            float *to = out + (i * hc + j) * dim;
#pragma omp simd
            for (i64 d = 0; d < dim; d++) to[d] = stream[d] + gate * value[d];
        }
    }
}
