// Packing, unpacking and rounding of cache rows; equal to kernels/reference/quant.py bit for bit. Compiled without
// contraction to fused multiply-adds, which would round differently.
#include "rows.h"

// Nearest E4M3 code of |x| <= 448, ties to even.
INLINE uint8_t e4m3_code(float x) {
    const uint32_t u = as_bits(x), magnitude = u & 0x7fffffffu;
    const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
    const uint32_t subnormal = as_bits(as_float(magnitude) + 0x1p14f) - as_bits(0x1p14f);  // steps of 2^-9
    return (uint8_t)((magnitude < 0x3c800000u ? subnormal : normal) | (u >> 24 & 0x80));  // 0x3c800000 is 2^-6
}
// Nearest E2M1 code, ties to the even code, clamped to +-6.
INLINE uint8_t e2m1_code(float x) {
    const float m = fabsf(x);
    const int code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
    return (uint8_t)(code | (int)(as_bits(x) >> 31) << 3);
}
// Biased exponent of the smallest power of two >= x, for normal positive x.
INLINE uint32_t ceil_exponent(float x) {
    const uint32_t u = as_bits(x);
    return (u >> 23) + ((u & 0x7fffffu) != 0);
}
// Largest |x|, NaN if there is one: as integers, magnitudes are in the order of their values and NaN is above all.
INLINE float group_amax(const float *x, int n) {
    int32_t m = 0;
#pragma omp simd reduction(max : m)
    for (int i = 0; i < n; i++) {
        const int32_t magnitude = (int32_t)(as_bits(x[i]) & 0x7fffffffu);
        m = MAX(m, magnitude);
    }
    return as_float((uint32_t)m);
}
INLINE float clamp(float x, float limit) { return MIN(limit, MAX(-limit, x)); }

// Scales of a group; those of a group that has no finite scale are NaN, and so are then all its values.
enum { E8M0_NAN = 255, E4M3_NAN = 0x7f };
INLINE uint32_t fp8_exponent(const float *x) {
    const float amax = group_amax(x, 32);
    return isfinite(amax) ? ceil_exponent(MAX(amax, 1e-4f) * (float)(1.0 / 448.0)) : E8M0_NAN;
}
INLINE uint32_t mxfp4_exponent(const float *x) {
    const float amax = group_amax(x, 32);
    // amax >= 6 * 2^-126, so the quotient is normal and its exponent byte at least 1.
    return isfinite(amax) ? ceil_exponent(MAX(amax, 6.0f * 0x1p-126f) / 6.0f) : E8M0_NAN;
}
INLINE uint8_t nvfp4_scale(const float *x) {
    const float amax = group_amax(x, 16);
    return isnan(amax) ? E4M3_NAN : e4m3_code(MIN(MAX(amax, 6.0f * 0x1p-9f) / 6.0f, 448.0f));
}

static void encode_nibbles(const float *x, float scale, int n, uint8_t *out) {
    uint8_t codes[32];
#pragma omp simd
    for (int i = 0; i < n; i++) codes[i] = e2m1_code(x[i] / scale);
    for (int i = 0; i < n / 2; i++) out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

static void encode_row(int kind, const float *x, i64 dim, void *row) {
    uint8_t *bytes = row;
    switch (kind) {
    case ROW_F32: memcpy(row, x, dim * sizeof(float)); break;
    case ROW_BF16:
        for (i64 i = 0; i < dim; i++) {
            const uint32_t u = as_bits(x[i]);
            const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16;
            ((uint16_t *)row)[i] = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
        }
        break;
    case ROW_FP8:
        for (i64 g = 0; g < dim / 32; g++) {
            const uint32_t exponent = fp8_exponent(x + 32 * g);
            const float scale = as_float(exponent << 23);
            bytes[dim + g] = (uint8_t)exponent;
            if (exponent == E8M0_NAN) {
                memset(bytes + 32 * g, 0, 32);
                continue;
            }
#pragma omp simd
            for (int i = 0; i < 32; i++) bytes[32 * g + i] = e4m3_code(clamp(x[32 * g + i] / scale, 448.0f));
        }
        break;
    case ROW_MXFP4:
        for (i64 g = 0; g < dim / 32; g++) {
            const uint32_t exponent = mxfp4_exponent(x + 32 * g);
            bytes[dim / 2 + g] = (uint8_t)exponent;
            if (exponent == E8M0_NAN) memset(bytes + 16 * g, 0, 16);
            else encode_nibbles(x + 32 * g, as_float(exponent << 23), 32, bytes + 16 * g);
        }
        break;
    case ROW_NVFP4:
        for (i64 g = 0; g < dim / 16; g++) {
            const uint8_t scale = nvfp4_scale(x + 16 * g);
            bytes[dim / 2 + g] = scale;
            if (scale == E4M3_NAN) memset(bytes + 8 * g, 0, 8);
            else encode_nibbles(x + 16 * g, e4m3_value(scale), 16, bytes + 8 * g);
        }
        break;
    }
}

void fp8_round_trip(const float *x, i64 n, float *out) {
    for (i64 g = 0; g < n; g += 32) {
        const float scale = e8m0_value((uint8_t)fp8_exponent(x + g));
        if (isnan(scale)) {
            for (int i = 0; i < 32; i++) out[g + i] = scale;
            continue;
        }
#pragma omp simd
        for (int i = 0; i < 32; i++) out[g + i] = e4m3_value(e4m3_code(clamp(x[g + i] / scale, 448.0f))) * scale;
    }
}

static i64 slot_at(const void *slots, int wide, i64 i) {
    return wide ? ((const i64 *)slots)[i] : ((const int32_t *)slots)[i];
}

EXPORT void store_rows(void *cache, i64 page_size, i64 page_stride, i64 row_stride, int kind, const void *slots, int wide,
                       const float *values, i64 n, i64 dim) {
    const Rows rows = {cache, page_size, page_stride, row_stride, kind};
#pragma omp parallel for if (n * dim * 8 > PARALLEL_WORK)
    for (i64 i = 0; i < n; i++) encode_row(kind, values + i * dim, dim, (void *)row_at(&rows, slot_at(slots, wide, i)));
}

EXPORT void load_rows(const void *cache, i64 page_size, i64 page_stride, i64 row_stride, int kind, const void *slots,
                      int wide, float *out, i64 n, i64 dim) {
    const Rows rows = {cache, page_size, page_stride, row_stride, kind};
#pragma omp parallel for if (n * dim * 2 > PARALLEL_WORK)
    for (i64 i = 0; i < n; i++) {
        const i64 slot = slot_at(slots, wide, i);
        decode_row(kind, row_at(&rows, MAX(slot, 0)), dim, out + i * dim);
    }
}

EXPORT void round_trip_rows(int kind, const float *values, i64 n, i64 dim, float *out) {
#pragma omp parallel for if (n * dim * 8 > PARALLEL_WORK)
    for (i64 i = 0; i < n; i++) {
        if (kind == ROW_FP8) {
            fp8_round_trip(values + i * dim, dim, out + i * dim);
            continue;
        }
        float row[dim];  // no packed row is longer
        encode_row(kind, values + i * dim, dim, row);
        decode_row(kind, row, dim, out + i * dim);
    }
}
