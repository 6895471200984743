"""Casts to FP8 and FP4, alone and fused, and their inverse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.reference.cache_rows import RowFormat
from deepinfer.kernels.tilelang_ops.operations import DTYPES, FORMATS, call, covered, empty, launch


@call
def round_fp8(x: Tensor) -> Tensor:
    return _rounded(x, RowFormat.FP8)


@call
def round_trip_rows(values: Tensor, cache: Tensor, row_format: RowFormat) -> Tensor:
    return _rounded(values, row_format) if cache.dtype is torch.uint8 else NotImplemented


def _rounded(x: Tensor, row_format: RowFormat) -> Tensor:
    dim = x.shape[-1]
    if dim % 32 or not covered(x):
        return NotImplemented
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = (dim, *FORMATS[row_format], DTYPES[x.dtype])
    launch("round_rows_tl", sizes, x.reshape(-1, dim).contiguous(), out.view(-1, dim))
    return out


@call
def cast_groups(x: Tensor, values: str, scales: str, group_rows: int, group_columns: int) -> tuple[Tensor, Tensor]:
    n, dim = x.shape
    if dim % 64 or not covered(x):
        return NotImplemented
    codes = empty(x, n, dim if values == "e4m3" else dim // 2, dtype=torch.uint8)
    scale_dtype = torch.float32 if scales == "float32" else torch.uint8
    stored = empty(x, -(-n // group_rows), dim // group_columns, dtype=scale_dtype)
    if group_rows == 1 and group_columns > 1:
        sizes: tuple[Any, ...] = (dim, values, scales, group_columns, DTYPES[x.dtype])
        launch("cast_rows_tl", sizes, x.contiguous(), codes, stored)
    else:
        sizes = (dim, values, scales, group_rows, group_columns, DTYPES[x.dtype])
        launch("cast_blocks_tl", sizes, x.contiguous(), codes, stored)
    return codes, stored


@call
def uncast_groups(
    codes: Tensor, stored: Tensor, values: str, scales: str, group_rows: int, group_columns: int, dtype: torch.dtype
) -> Tensor:
    n, dim = codes.shape[0], stored.shape[1] * group_columns
    if dim % 32 or dtype not in DTYPES:
        return NotImplemented
    out = empty(codes, n, dim, dtype=dtype)
    sizes = (dim, values, scales, group_rows, group_columns, DTYPES[dtype])
    launch("uncast_tl", sizes, codes.contiguous(), stored.contiguous(), out)
    return out


def _fp8_rows(like: Tensor, n: int, dim: int) -> tuple[Tensor, Tensor]:
    return empty(like, n, dim, dtype=torch.uint8), empty(like, n, dim // 32, dtype=torch.uint8)


@call
def norm_cast(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    n, dim = x.shape
    if dim % 64 or not covered(x, weight):
        return NotImplemented
    out = _fp8_rows(x, n, dim)
    launch("norm_cast_tl", (dim, eps, DTYPES[x.dtype]), x.contiguous(), weight, *out)
    return out


@call
def swiglu_cast(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    n, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if inner % 64 or not covered(gate_up):
        return NotImplemented
    out = _fp8_rows(gate_up, n, inner)
    launch("swiglu_cast_tl", (inner, limit, DTYPES[gate_up.dtype]), gate_up.contiguous(), *out)
    return out


@call
def rope_cast(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    n, heads, dim = x.shape
    if dim % 64 or not covered(x) or cos.dtype is not torch.float32:
        return NotImplemented
    out = _fp8_rows(x, n, heads * dim)
    sizes = (heads, dim, cos.shape[1], inverse, DTYPES[x.dtype])
    launch("rope_cast_tl", sizes, x.contiguous(), cos.contiguous(), sin.contiguous(), *out)
    return out
