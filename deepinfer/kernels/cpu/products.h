// Products with weights as they are stored (products.c).
#pragma once
#include "rows.h"

// A weight [rows, k]: float32, BF16, E4M3 with an E8M0 scale for 32 x 32 values, or E2M1 pairs with one for 1 x 32.
typedef struct {
    int kind;
    const void *values;
    const uint8_t *scales;
    i64 k;
} Weight;

enum { BUFFER_ROWS = 2 * LANES };  // rows of a weight that a caller may ask for at once; 32 have the same FP8 scales

// out[i, c] = x[i] . row first + c of w, for n rows of x and `count` of w; `buffer` has room for BUFFER_ROWS * k floats,
// which w in float32 does not need. A result does not depend on n.
void products(const float *const *x, i64 n, const Weight *w, i64 first, i64 count, float *out, i64 ldo, float *buffer);
void decode_weight(const Weight *w, i64 first, i64 count, float *out);
