"""CPU kernels that read or write cache rows: attention, indexer scores, store, load and round trip."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.cpu.library import functions, ready
from deepinfer.kernels.reference import attention, indexer  # noqa: F401  (define the operations)
from deepinfer.kernels.reference.cache_rows import RowFormat, latent_format
from deepinfer.kernels.registry import backend

# enum row_kind of rows.h; packed rows are read 32 values at a time.
_FLOAT_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_PACKED_KINDS = {RowFormat.FP8: 2, RowFormat.MXFP4: 3, RowFormat.NVFP4: 4}
_NO_CACHE = (None, 1, 0, 0, 0)


def _row_kind(cache: Tensor, row_format: RowFormat, dim: int) -> int | None:
    if cache.dtype is torch.uint8:
        return _PACKED_KINDS[row_format] if dim % 32 == 0 else None
    return _FLOAT_KINDS.get(cache.dtype)


def _cache_arguments(cache: Tensor, row_format: RowFormat, dim: int) -> tuple[int, int, int, int, int] | None:
    """Data, page size, strides in bytes and row kind; None if the kernels cannot read it."""
    kind = _row_kind(cache, row_format, dim)
    page_stride, row_stride, element_stride = cache.stride()
    if kind is None or element_stride != 1:
        return None
    size = cache.element_size()
    return cache.data_ptr(), cache.shape[1], page_stride * size, row_stride * size, kind


def _int32(slots: Tensor) -> Tensor:
    return slots.to(torch.int32).contiguous()


@backend("sparse_attention", "cpu")
def sparse_attention(
    q: Tensor,
    window_cache: Tensor,
    window_slots: Tensor,
    latent_cache: Tensor | None,
    latent_slots: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    kernels = functions()
    if kernels is None or not ready(q, sink):
        return NotImplemented
    n, heads, dim = q.shape
    window = _cache_arguments(window_cache, RowFormat.FP8, dim)
    window_slots = _int32(window_slots)
    latent: tuple | None = _NO_CACHE
    latent_pointer, latent_count = None, 0
    if latent_cache is not None and latent_slots is not None:
        latent = _cache_arguments(latent_cache, latent_format(latent_cache, dim), dim)
        latent_slots = _int32(latent_slots)
        latent_pointer, latent_count = latent_slots.data_ptr(), latent_slots.shape[1]
    if window is None or latent is None:
        return NotImplemented
    out = torch.empty_like(q)
    kernels["sparse_attention"](
        q.data_ptr(), n, heads, dim,
        *window, window_slots.data_ptr(), window_slots.shape[1],
        *latent, latent_pointer, latent_count,
        sink.data_ptr(), scale, out.data_ptr(),
    )  # fmt: skip
    return out


@backend("index_scores", "cpu")
def index_scores(
    iq: Tensor, weights: Tensor, cache: Tensor, block_tables: Tensor, sequence_of_row: Tensor, visible: Tensor
) -> Tensor:
    kernels = functions()
    if kernels is None or not ready(iq, weights):
        return NotImplemented
    n, heads, dim = iq.shape
    arguments = _cache_arguments(cache, RowFormat.MXFP4, dim)
    if arguments is None:
        return NotImplemented
    block_tables, sequence_of_row, visible = _int32(block_tables), _int32(sequence_of_row), _int32(visible)
    width = int(visible.max()) if n else 0
    scores = torch.empty(n, width, dtype=torch.float32)
    kernels["index_scores"](
        iq.data_ptr(), weights.data_ptr(), n, heads, dim,
        *arguments, block_tables.data_ptr(), block_tables.shape[1], sequence_of_row.data_ptr(), visible.data_ptr(),
        width, scores.data_ptr(),
    )  # fmt: skip
    return scores


@backend("store_rows", "cpu")
def store_rows(cache: Tensor, slots: Tensor, values: Tensor, row_format: RowFormat) -> None:
    kernels = functions()
    n, dim = values.shape
    arguments = _cache_arguments(cache, row_format, dim)
    if kernels is None or arguments is None or not ready(values):
        return NotImplemented
    slots = slots.contiguous()
    wide = slots.dtype is torch.int64
    kernels["store_rows"](*arguments, slots.data_ptr(), wide, values.data_ptr(), n, dim)
    return None


@backend("load_rows", "cpu")
def load_rows(cache: Tensor, slots: Tensor, row_format: RowFormat, dim: int, dtype: torch.dtype) -> Tensor:
    kernels = functions()
    arguments = _cache_arguments(cache, row_format, dim)
    if kernels is None or dtype is not torch.float32 or arguments is None:
        return NotImplemented
    slots = slots.contiguous()
    out = torch.empty(*slots.shape, dim, dtype=torch.float32)
    wide = slots.dtype is torch.int64
    kernels["load_rows"](*arguments, slots.data_ptr(), wide, out.data_ptr(), slots.numel(), dim)
    return out


@backend("round_trip_rows", "cpu")
def round_trip_rows(values: Tensor, cache: Tensor, row_format: RowFormat) -> Tensor:
    if cache.dtype is torch.float32 and values.dtype is torch.float32:
        return values
    kernels = functions()
    kind = _row_kind(cache, row_format, values.shape[-1])
    if kernels is None or kind is None or not ready(values):
        return NotImplemented
    out = torch.empty_like(values)
    dim = values.shape[-1]
    kernels["round_trip_rows"](kind, values.data_ptr(), values.numel() // dim, dim, out.data_ptr())
    return out
