"""Norm, gated activation and rotation of one row."""

from typing import Any

import tilelang.language as T


def wide(x: Any) -> Any:
    return T.cast(x, "float32")


def rms_factor(total: Any, dim: int, eps: float) -> Any:
    return T.rsqrt(total / dim + eps)


def gated(g: Any, u: Any, limit: float) -> Any:
    """silu(min(g, limit)) * clamp(u); a NaN stays."""
    g = T.if_then_else(wide(g) > limit, limit, wide(g))
    u = T.if_then_else(wide(u) > limit, limit, T.if_then_else(wide(u) < -limit, -limit, wide(u)))
    return g / (1.0 + T.exp(-g)) * u


def rotated_even(even: Any, odd: Any, cos: Any, sin: Any) -> Any:
    return wide(even) * cos - wide(odd) * sin


def rotated_odd(even: Any, odd: Any, cos: Any, sin: Any) -> Any:
    return wide(even) * sin + wide(odd) * cos


@T.macro
def sum_squares(x, row, dim, total):
    """total[0] of x[row, :dim]."""
    square = T.alloc_fragment((1, dim), "float32")
    for i, j in T.Parallel(1, dim):
        square[i, j] = wide(x[row, j]) * wide(x[row, j])
    T.reduce_sum(square, total, dim=1)


@T.macro
def rms_norm(x, weight, out, row, dim, eps):
    total = T.alloc_fragment((1,), "float32")
    sum_squares(x, row, dim, total)
    for i, j in T.Parallel(1, dim):
        out[row, j] = wide(weight[j]) * (wide(x[row, j]) * rms_factor(total[i], dim, eps))


@T.macro
def swiglu(gate_up, out, row, inner, limit):
    for j in T.Parallel(inner):
        out[row, j] = gated(gate_up[row, j], gate_up[row, inner + j], limit)


@T.macro
def rope(x, cos, sin, out, row, heads, plain, pairs, sign):
    """x and out [., heads, plain + 2 pairs], cos and sin [., pairs]; sign -1 rotates back."""
    for h, j in T.Parallel(heads, plain):
        out[row, h, j] = x[row, h, j]
    for h, j in T.Parallel(heads, pairs):
        even, odd = x[row, h, plain + 2 * j], x[row, h, plain + 2 * j + 1]
        out[row, h, plain + 2 * j] = rotated_even(even, odd, cos[row, j], sign * sin[row, j])
        out[row, h, plain + 2 * j + 1] = rotated_odd(even, odd, cos[row, j], sign * sin[row, j])


@T.macro
def norm_rope(x, weight, cos, sin, out, row, plain, pairs, eps, dtype):
    """`rope` of `rms_norm`, rounded to `dtype` in between; x and out [., plain + 2 pairs]."""
    dim = plain + 2 * pairs
    total = T.alloc_fragment((1,), "float32")
    sum_squares(x, row, dim, total)
    for i, j in T.Parallel(1, plain):
        out[row, j] = wide(weight[j]) * (wide(x[row, j]) * rms_factor(total[i], dim, eps))
    for i, j in T.Parallel(1, pairs):
        at = plain + 2 * j
        even = T.cast(wide(weight[at]) * (wide(x[row, at]) * rms_factor(total[i], dim, eps)), dtype)
        odd = T.cast(wide(weight[at + 1]) * (wide(x[row, at + 1]) * rms_factor(total[i], dim, eps)), dtype)
        out[row, at] = rotated_even(even, odd, cos[row, j], sin[row, j])
        out[row, at + 1] = rotated_odd(even, odd, cos[row, j], sin[row, j])
