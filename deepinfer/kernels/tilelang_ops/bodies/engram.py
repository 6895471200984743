"""Engram: table rows of n-grams, and the gate of what was read into the streams."""

import tilelang.language as T

from deepinfer.kernels.tilelang_ops import formats
from deepinfer.kernels.tilelang_ops.bodies.rows import wide


def ngram_mix(history, multipliers, row, length, step, pad):
    """int64: xor of ids times multipliers, of a token and `step` + 1 before it; past a boundary (-1) ids are `pad`."""
    is_blocked = history[row, 0] < 0
    mix = T.if_then_else(is_blocked, T.int64(pad), history[row, 0]) * multipliers[0]
    for back in range(1, length):
        is_blocked = T.Or(is_blocked, history[row, back] < 0)
        with_more = mix ^ (T.if_then_else(is_blocked, T.int64(pad), history[row, back]) * multipliers[back])
        mix = with_more if back == 1 else T.if_then_else(back <= step + 1, with_more, mix)
    return mix


@T.macro
def engram_hash(history, multipliers, primes, offsets, out, row, length, heads, pad):
    """out[row, (length - 1) * heads] of history[row, :length]; all int64."""
    for j in T.Parallel((length - 1) * heads):
        mix = ngram_mix(history, multipliers, row, length, j // heads, pad)
        out[row, j] = T.floormod(mix, primes[j // heads, j % heads]) + offsets[j // heads, j % heads]


@T.macro
def engram_gate(h, kv, weight, alive, out, row, stream, key_at, value_at, dim, eps):
    """out[row, stream, :] = h + alive * gate * value: keys are kv[row, key_at + .], values kv[row, value_at + .]."""
    square = T.alloc_fragment((1, dim), "float32")
    h_total = T.alloc_fragment((1,), "float32")
    key_total = T.alloc_fragment((1,), "float32")
    dot = T.alloc_fragment((1,), "float32")
    for i, j in T.Parallel(1, dim):
        square[i, j] = wide(h[row, stream, j]) * wide(h[row, stream, j])
    T.reduce_sum(square, h_total, dim=1)
    for i, j in T.Parallel(1, dim):
        square[i, j] = wide(kv[row, key_at + j]) * wide(kv[row, key_at + j])
    T.reduce_sum(square, key_total, dim=1)
    for i, j in T.Parallel(1, dim):
        square[i, j] = wide(h[row, stream, j]) * wide(weight[stream, j]) * wide(kv[row, key_at + j])
    T.reduce_sum(square, dot, dim=1)
    for i in T.Parallel(1):
        norm = T.rsqrt(h_total[i] / dim + eps) * T.rsqrt(key_total[i] / dim + eps)
        dot[i] = dot[i] * norm / dim**0.5
        root = T.sqrt(T.max(T.abs(dot[i]), 1e-6))
        root = T.if_then_else(formats.is_nan(dot[i]), dot[i], root)  # a maximum drops NaN
        dot[i] = alive / (1.0 + T.exp(T.if_then_else(dot[i] < 0, root, -root)))
    for i, j in T.Parallel(1, dim):
        out[row, stream, j] = wide(h[row, stream, j]) + dot[i] * wide(kv[row, value_at + j])
