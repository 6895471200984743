"""Rows of paged caches, and slots in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.reference.cache_rows import RowFormat
from deepinfer.kernels.tilelang_ops.operations import DTYPES, call, covered, empty, launch


def _cache_sizes(cache: Tensor, row_format: RowFormat, dim: int) -> tuple[Any, ...]:
    kind = row_format.value if cache.dtype is torch.uint8 else DTYPES[cache.dtype]
    return dim, kind, cache.shape[1], cache.stride(0), cache.stride(1)


@call
def store_rows(cache: Tensor, slots: Tensor, values: Tensor, row_format: RowFormat) -> None:
    dim = values.shape[-1]
    if dim % 64 or not covered(values) or cache.stride(2) != 1 or cache.dtype not in (torch.uint8, *DTYPES):
        return NotImplemented
    if len(values):
        sizes = (*_cache_sizes(cache, row_format, dim), DTYPES[values.dtype])
        launch("store_rows_tl", sizes, values.contiguous(), slots.int(), cache)
    return None


@call
def load_rows(cache: Tensor, slots: Tensor, row_format: RowFormat, dim: int, dtype: torch.dtype) -> Tensor:
    if dim % 32 or dtype not in DTYPES or cache.stride(2) != 1 or cache.dtype not in (torch.uint8, *DTYPES):
        return NotImplemented
    out = empty(cache, *slots.shape, dim, dtype=dtype)
    sizes = (*_cache_sizes(cache, row_format, dim), DTYPES[dtype])
    launch("load_rows_tl", sizes, cache, slots.int().flatten(), out.view(-1, dim))
    return out


@call
def entry_slots(positions: Tensor, block_tables: Tensor, sequence_of_row: Tensor, entries: int) -> Tensor:
    out = empty(positions, *positions.shape, dtype=torch.int32)
    sizes = (positions.shape[1], block_tables.shape[1], block_tables.stride(0), entries)
    launch("entry_slots_tl", sizes, positions.int().contiguous(), block_tables, sequence_of_row.int(), out)
    return out


@call
def window_slots(positions: Tensor, state_slots: Tensor, window: int, ring: int) -> Tensor:
    out = empty(positions, len(positions), window, dtype=torch.int32)
    launch("window_slots_tl", (window, ring), positions.int(), state_slots.int(), out)
    return out
