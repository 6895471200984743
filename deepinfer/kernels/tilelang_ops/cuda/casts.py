"""Casts to FP8 and FP4, alone and behind a norm, a gated activation or a rotation, and their inverse.

values: 'e4m3' or 'e2m1' (two a byte); scales: 'ue8m0' or 'e4m3' (bytes) or 'float32'.
"""

from typing import Any

import tilelang.language as T

from deepinfer.kernels.tilelang_ops.bodies import casts, threads_for

GROUP = 32  # values of a scale behind a fused operation
BLOCK_THREADS = 256
TILE = 32  # columns of a block whose groups are narrower


def code_bytes(dim: int, values: str) -> int:
    return dim if values == "e4m3" else dim // 2


def scale_dtype(scales: str) -> str:
    return "float32" if scales == "float32" else "uint8"


def round_rows_tl(dim: int, values: str, scales: str, group: int, dtype: str = "bfloat16") -> Any:
    """`round_fp8` and `round_trip_rows` of x [n, dim]."""
    n = T.dynamic("n")

    @T.prim_func
    def round_rows(x: T.Tensor((n, dim), dtype), out: T.Tensor((n, dim), dtype)):
        with T.Kernel(n, threads=threads_for(dim)) as row:
            casts.round_row(x, out, row, dim, group, values, scales, dtype)

    return round_rows


def cast_rows_tl(dim: int, values: str, scales: str, group: int, dtype: str = "bfloat16") -> Any:
    """`cast_groups` of x [n, dim], a scale for `group` columns of a row: a part of it, or all."""
    n = T.dynamic("n")

    @T.prim_func
    def cast_rows(
        x: T.Tensor((n, dim), dtype),
        codes: T.Tensor((n, code_bytes(dim, values)), "uint8"),
        scale: T.Tensor((n, dim // group), scale_dtype(scales)),
    ):
        with T.Kernel(n, threads=threads_for(dim // 2)) as row:
            casts.cast_row(
                casts.numbers(x, row), codes, casts.columns(row), scale, casts.columns(row), dim, group, values, scales,
                dtype,
            )  # fmt: skip

    return cast_rows


def cast_blocks_tl(dim: int, values: str, scales: str, height: int, group: int, dtype: str = "bfloat16") -> Any:
    """`cast_groups` of x [n, dim], a scale for `height` rows and `group` columns: blocks, or channels (group 1)."""
    n, width = T.dynamic("n"), max(group, TILE)

    @T.prim_func
    def cast_blocks(
        x: T.Tensor((n, dim), dtype),
        codes: T.Tensor((n, code_bytes(dim, values)), "uint8"),
        scale: T.Tensor((T.ceildiv(n, height), dim // group), scale_dtype(scales)),
    ):
        with T.Kernel(T.ceildiv(n, height), dim // width, threads=BLOCK_THREADS) as (block, part):
            memory = T.alloc_shared((width // group,), "float32")
            casts.cast_block(
                x, codes, scale, memory, block * height, part * width, block, n, height, width, group, values, scales,
                dtype,
            )  # fmt: skip

    return cast_blocks


def uncast_tl(dim: int, values: str, scales: str, height: int, group: int, dtype: str = "bfloat16") -> Any:
    """`uncast_groups` of codes [n, .] with a scale for `height` rows and `group` columns."""
    n = T.dynamic("n")

    @T.prim_func
    def uncast(
        codes: T.Tensor((n, code_bytes(dim, values)), "uint8"),
        scale: T.Tensor((T.ceildiv(n, height), dim // group), scale_dtype(scales)),
        out: T.Tensor((n, dim), dtype),
    ):
        with T.Kernel(n, threads=threads_for(dim)) as row:
            casts.uncast_row(
                codes, casts.columns(row), scale, casts.columns(row // height), out, row, dim, group, values, scales
            )  # fmt: skip

    return uncast


def norm_cast_tl(dim: int, eps: float, dtype: str = "bfloat16") -> Any:
    """`norm_cast` of x [n, dim] with weight [dim]."""
    n = T.dynamic("n")

    @T.prim_func
    def norm_cast(
        x: T.Tensor((n, dim), dtype),
        weight: T.Tensor((dim,), dtype),
        codes: T.Tensor((n, dim), "uint8"),
        scale: T.Tensor((n, dim // GROUP), "uint8"),
    ):
        with T.Kernel(n, threads=threads_for(dim // 2)) as row:
            casts.norm_cast(x, weight, codes, scale, row, dim, GROUP, eps, dtype)

    return norm_cast


def swiglu_cast_tl(inner: int, limit: float, dtype: str = "bfloat16") -> Any:
    """`swiglu_cast` of gate_up [n, 2 inner] = [g | u]."""
    n = T.dynamic("n")

    @T.prim_func
    def swiglu_cast(
        gate_up: T.Tensor((n, 2 * inner), dtype),
        codes: T.Tensor((n, inner), "uint8"),
        scale: T.Tensor((n, inner // GROUP), "uint8"),
    ):
        with T.Kernel(n, threads=threads_for(inner // 2)) as row:
            casts.swiglu_cast(gate_up, codes, scale, row, inner, GROUP, limit, dtype)

    return swiglu_cast


def rope_cast_tl(heads: int, dim: int, pairs: int, inverse: bool = False, dtype: str = "bfloat16") -> Any:
    """`rope_cast` of x [n, heads, dim] by cos and sin [n, pairs], one block a row and head."""
    n = T.dynamic("n")

    @T.prim_func
    def rope_cast(
        x: T.Tensor((n, heads, dim), dtype),
        cos: T.Tensor((n, pairs), "float32"),
        sin: T.Tensor((n, pairs), "float32"),
        codes: T.Tensor((n, heads * dim), "uint8"),
        scale: T.Tensor((n, heads * dim // GROUP), "uint8"),
    ):
        with T.Kernel(n, heads, threads=threads_for(dim // 2)) as (row, head):
            casts.rope_cast(
                x, cos, sin, codes, scale, row, head, row, head, dim, pairs, GROUP, -1.0 if inverse else 1.0, dtype
            )  # fmt: skip

    return rope_cast
