"""Norm, gated activation and rotation of rows: rows come to the Unified Buffer, vector cores work on them there."""

from typing import Any

import tilelang.ascend.language as T

THREADS = 128


def rms_norm_tl(dim: int, eps: float, dtype: str = "bfloat16") -> Any:
    """`rms_norm` of x [n, dim] with weight [dim], one block a row."""
    n = T.dynamic("n")

    @T.prim_func
    def rms_norm(x: T.Tensor((n, dim), dtype), weight: T.Tensor((dim,), dtype), out: T.Tensor((n, dim), dtype)):
        with T.Kernel(n) as row:
            x_row = T.alloc_shared((1, dim), dtype)
            weights = T.alloc_shared((dim,), dtype)
            T.copy(x[row, 0], x_row)
            T.copy(weight, weights)
            with T.SimtVF(threads=THREADS):
                value = T.alloc_fragment((1, dim), "float32")
                square = T.alloc_fragment((1, dim), "float32")
                total = T.alloc_fragment((1,), "float32")
                for i, j in T.Parallel(1, dim):
                    value[i, j] = x_row[i, j]
                for i, j in T.Parallel(1, dim):
                    square[i, j] = value[i, j] * value[i, j]
                T.reduce_sum(square, total, dim=1)
                for i, j in T.Parallel(1, dim):
                    x_row[i, j] = weights[j] * (value[i, j] * T.rsqrt(total[i] / dim + eps))
            T.copy(x_row, out[row, 0])

    return rms_norm


def swiglu_tl(inner: int, limit: float, dtype: str = "bfloat16") -> Any:
    """`swiglu` of gate_up [n, 2 inner] = [g | u], one block a row."""
    n = T.dynamic("n")

    @T.prim_func
    def swiglu(gate_up: T.Tensor((n, 2 * inner), dtype), out: T.Tensor((n, inner), dtype)):
        with T.Kernel(n) as row:
            both = T.alloc_shared((1, 2 * inner), dtype)
            result = T.alloc_shared((1, inner), dtype)
            T.copy(gate_up[row, 0], both)
            with T.SimtVF(threads=THREADS):
                for i, j in T.Parallel(1, inner):
                    g = T.min(T.cast(both[i, j], "float32"), limit)
                    u = T.max(T.min(T.cast(both[i, inner + j], "float32"), limit), -limit)
                    result[i, j] = g / (1.0 + T.exp(-g)) * u
            T.copy(result, out[row, 0])

    return swiglu


def rope_tl(heads: int, dim: int, pairs: int, dtype: str = "bfloat16") -> Any:
    """`rope` (not inverse) of x [n, heads, dim] by cos and sin [n, pairs], one block a row and head."""
    n = T.dynamic("n")
    plain = dim - 2 * pairs

    @T.prim_func
    def rope(
        x: T.Tensor((n, heads, dim), dtype),
        cos: T.Tensor((n, pairs), "float32"),
        sin: T.Tensor((n, pairs), "float32"),
        out: T.Tensor((n, heads, dim), dtype),
    ):
        with T.Kernel(n * heads) as block:
            row, head = block // heads, block % heads
            value = T.alloc_shared((1, 1, dim), dtype)
            c = T.alloc_shared((1, pairs), "float32")
            s = T.alloc_shared((1, pairs), "float32")
            T.copy(x[row, head, 0], value)
            T.copy(cos[row, 0], c)
            T.copy(sin[row, 0], s)
            with T.SimtVF(threads=THREADS):
                for i, j in T.Parallel(1, pairs):
                    even = T.cast(value[i, i, plain + 2 * j], "float32")
                    odd = T.cast(value[i, i, plain + 2 * j + 1], "float32")
                    value[i, i, plain + 2 * j] = even * c[i, j] - odd * s[i, j]
                    value[i, i, plain + 2 * j + 1] = even * s[i, j] + odd * c[i, j]
            T.copy(value, out[row, head, 0])

    return rope
