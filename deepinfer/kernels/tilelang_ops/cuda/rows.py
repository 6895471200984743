"""Norm, gated activation and rotation of rows, one block a row."""

from typing import Any

import tilelang.language as T

from deepinfer.kernels.tilelang_ops.bodies import rows, threads_for

THREADS = 128


def rms_norm_tl(dim: int, eps: float, dtype: str = "bfloat16") -> Any:
    """`rms_norm` of x [n, dim] with weight [dim]."""
    n = T.dynamic("n")

    @T.prim_func
    def rms_norm(x: T.Tensor((n, dim), dtype), weight: T.Tensor((dim,), dtype), out: T.Tensor((n, dim), dtype)):
        with T.Kernel(n, threads=threads_for(dim)) as row:
            rows.rms_norm(x, weight, out, row, dim, eps)

    return rms_norm


def swiglu_tl(inner: int, limit: float, dtype: str = "bfloat16") -> Any:
    """`swiglu` of gate_up [n, 2 inner] = [g | u]."""
    n = T.dynamic("n")

    @T.prim_func
    def swiglu(gate_up: T.Tensor((n, 2 * inner), dtype), out: T.Tensor((n, inner), dtype)):
        with T.Kernel(n, threads=THREADS) as row:
            rows.swiglu(gate_up, out, row, inner, limit)

    return swiglu


def rope_tl(heads: int, dim: int, pairs: int, inverse: bool = False, dtype: str = "bfloat16") -> Any:
    """`rope` of x [n, heads, dim] by cos and sin [n, pairs]."""
    n = T.dynamic("n")

    @T.prim_func
    def rope(
        x: T.Tensor((n, heads, dim), dtype),
        cos: T.Tensor((n, pairs), "float32"),
        sin: T.Tensor((n, pairs), "float32"),
        out: T.Tensor((n, heads, dim), dtype),
    ):
        with T.Kernel(n, threads=THREADS) as row:
            rows.rope(x, cos, sin, out, row, heads, dim - 2 * pairs, pairs, -1.0 if inverse else 1.0)

    return rope


def norm_rope_tl(dim: int, pairs: int, eps: float, dtype: str = "bfloat16") -> Any:
    """`norm_rope` of x [n, dim] with weight [dim] by cos and sin [n, pairs]."""
    n = T.dynamic("n")

    @T.prim_func
    def norm_rope(
        x: T.Tensor((n, dim), dtype),
        weight: T.Tensor((dim,), dtype),
        cos: T.Tensor((n, pairs), "float32"),
        sin: T.Tensor((n, pairs), "float32"),
        out: T.Tensor((n, dim), dtype),
    ):
        with T.Kernel(n, threads=threads_for(dim)) as row:
            rows.norm_rope(x, weight, cos, sin, out, row, dim - 2 * pairs, pairs, eps, dtype)

    return norm_rope
