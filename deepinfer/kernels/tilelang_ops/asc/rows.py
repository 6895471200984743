"""Norm, gated activation and rotation: a row comes to the Unified Buffer, vector cores work on it there."""

from typing import Any

import tilelang.ascend.language as T

from deepinfer.kernels.tilelang_ops.bodies import rows, threads_for

THREADS = 128


def rms_norm_tl(dim: int, eps: float, dtype: str = "bfloat16") -> Any:
    """`rms_norm` of x [n, dim] with weight [dim]."""
    n = T.dynamic("n")

    @T.prim_func
    def rms_norm(x: T.Tensor((n, dim), dtype), weight: T.Tensor((dim,), dtype), out: T.Tensor((n, dim), dtype)):
        with T.Kernel(n) as row:
            value, weights = T.alloc_shared((1, dim), dtype), T.alloc_shared((dim,), dtype)
            T.copy(x[row, 0], value)
            T.copy(weight, weights)
            with T.SimtVF(threads=threads_for(dim)):
                rows.rms_norm(value, weights, value, 0, dim, eps)
            T.copy(value, out[row, 0])

    return rms_norm


def swiglu_tl(inner: int, limit: float, dtype: str = "bfloat16") -> Any:
    """`swiglu` of gate_up [n, 2 inner] = [g | u]."""
    n = T.dynamic("n")

    @T.prim_func
    def swiglu(gate_up: T.Tensor((n, 2 * inner), dtype), out: T.Tensor((n, inner), dtype)):
        with T.Kernel(n) as row:
            both, result = T.alloc_shared((1, 2 * inner), dtype), T.alloc_shared((1, inner), dtype)
            T.copy(gate_up[row, 0], both)
            with T.SimtVF(threads=THREADS):
                rows.swiglu(both, result, 0, inner, limit)
            T.copy(result, out[row, 0])

    return swiglu


def rope_tl(heads: int, dim: int, pairs: int, inverse: bool = False, dtype: str = "bfloat16") -> Any:
    """`rope` of x [n, heads, dim] by cos and sin [n, pairs], one block a row and head."""
    n = T.dynamic("n")

    @T.prim_func
    def rope(
        x: T.Tensor((n, heads, dim), dtype),
        cos: T.Tensor((n, pairs), "float32"),
        sin: T.Tensor((n, pairs), "float32"),
        out: T.Tensor((n, heads, dim), dtype),
    ):
        with T.Kernel(n * heads) as block:
            row, head = block // heads, block % heads
            value, result = T.alloc_shared((1, 1, dim), dtype), T.alloc_shared((1, 1, dim), dtype)
            c, s = T.alloc_shared((1, pairs), "float32"), T.alloc_shared((1, pairs), "float32")
            T.copy(x[row, head, 0], value)
            T.copy(cos[row, 0], c)
            T.copy(sin[row, 0], s)
            with T.SimtVF(threads=THREADS):
                rows.rope(value, c, s, result, 0, 1, dim - 2 * pairs, pairs, -1.0 if inverse else 1.0)
            T.copy(result, out[row, head, 0])

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
        with T.Kernel(n) as row:
            value, result = T.alloc_shared((1, dim), dtype), T.alloc_shared((1, dim), dtype)
            weights = T.alloc_shared((dim,), dtype)
            c, s = T.alloc_shared((1, pairs), "float32"), T.alloc_shared((1, pairs), "float32")
            T.copy(x[row, 0], value)
            T.copy(weight, weights)
            T.copy(cos[row, 0], c)
            T.copy(sin[row, 0], s)
            with T.SimtVF(threads=threads_for(dim)):
                rows.norm_rope(value, weights, c, s, result, 0, dim - 2 * pairs, pairs, eps, dtype)
            T.copy(result, out[row, 0])

    return norm_rope
