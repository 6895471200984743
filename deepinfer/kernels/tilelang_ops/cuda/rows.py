"""Norm, gated activation and rotation of rows."""

from typing import Any

import tilelang.language as T

THREADS = 128


def rms_norm_tl(dim: int, eps: float, dtype: str = "bfloat16") -> Any:
    """`rms_norm` of x [n, dim] with weight [dim], one block a row."""
    n = T.dynamic("n")

    @T.prim_func
    def rms_norm(x: T.Tensor((n, dim), dtype), weight: T.Tensor((dim,), dtype), out: T.Tensor((n, dim), dtype)):
        with T.Kernel(n, threads=THREADS) as row:
            value = T.alloc_fragment((1, dim), "float32")
            square = T.alloc_fragment((1, dim), "float32")
            total = T.alloc_fragment((1,), "float32")
            for i, j in T.Parallel(1, dim):
                value[i, j] = x[row, j]
            for i, j in T.Parallel(1, dim):
                square[i, j] = value[i, j] * value[i, j]
            T.reduce_sum(square, total, dim=1)
            for i, j in T.Parallel(1, dim):
                out[row, j] = weight[j] * (value[i, j] * T.rsqrt(total[i] / dim + eps))

    return rms_norm


def swiglu_tl(inner: int, limit: float, dtype: str = "bfloat16") -> Any:
    """`swiglu` of gate_up [n, 2 inner] = [g | u], one block a row."""
    n = T.dynamic("n")

    @T.prim_func
    def swiglu(gate_up: T.Tensor((n, 2 * inner), dtype), out: T.Tensor((n, inner), dtype)):
        with T.Kernel(n, threads=THREADS) as row:
            g = T.alloc_fragment((inner,), "float32")
            u = T.alloc_fragment((inner,), "float32")
            for j in T.Parallel(inner):
                g[j] = T.min(T.cast(gate_up[row, j], "float32"), limit)
                u[j] = T.max(T.min(T.cast(gate_up[row, inner + j], "float32"), limit), -limit)
            for j in T.Parallel(inner):
                out[row, j] = g[j] / (1.0 + T.exp(-g[j])) * u[j]

    return swiglu


def rope_tl(heads: int, dim: int, pairs: int, dtype: str = "bfloat16") -> Any:
    """`rope` (not inverse) of x [n, heads, dim] by cos and sin [n, pairs], one block a row."""
    n = T.dynamic("n")
    plain = dim - 2 * pairs

    @T.prim_func
    def rope(
        x: T.Tensor((n, heads, dim), dtype),
        cos: T.Tensor((n, pairs), "float32"),
        sin: T.Tensor((n, pairs), "float32"),
        out: T.Tensor((n, heads, dim), dtype),
    ):
        with T.Kernel(n, threads=THREADS) as row:
            for h, j in T.Parallel(heads, plain):
                out[row, h, j] = x[row, h, j]
            for h, j in T.Parallel(heads, pairs):
                even = T.cast(x[row, h, plain + 2 * j], "float32")
                odd = T.cast(x[row, h, plain + 2 * j + 1], "float32")
                out[row, h, plain + 2 * j] = even * cos[row, j] - odd * sin[row, j]
                out[row, h, plain + 2 * j + 1] = even * sin[row, j] + odd * cos[row, j]

    return rope
