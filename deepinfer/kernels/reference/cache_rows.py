"""Writing and reading rows of the paged block cache and of the state cache.

A cache is a 3-D view [pages, page_size, row] (blocks of entries, or slots of ring rows) and a *slot* is the flat index
page * page_size + offset; -1 means "no row". A cache of a float dtype holds plain values (row = dim); a uint8 cache
holds packed rows of a `RowFormat` (spec: model, section 7).
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from deepinfer.kernels.reference import quant
from deepinfer.kernels.registry import operation


class RowFormat(Enum):
    """How a row of a uint8 cache is packed."""

    FP8 = "fp8"  # window: E4M3, UE8M0 per 32
    MXFP4 = "mxfp4"  # index keys: E2M1, UE8M0 per 32
    NVFP4 = "nvfp4"  # compressed KV: E2M1, E4M3 per 16

    def row_bytes(self, dim: int) -> int:
        """Bytes of one packed row of `dim` values: 528, 68 and 288 at V4.1-Flash's sizes."""
        return {"fp8": dim + dim // 32, "mxfp4": dim // 2 + dim // 32, "nvfp4": dim // 2 + dim // 16}[self.value]


def latent_format(cache: Tensor, dim: int) -> RowFormat:
    """How rows of compressed KV are packed in a uint8 cache: NVFP4 as released, or FP8, told apart by their length."""
    return RowFormat.FP8 if cache.shape[-1] == RowFormat.FP8.row_bytes(dim) else RowFormat.NVFP4


_PACK = {
    RowFormat.FP8: quant.pack_fp8_row,
    RowFormat.MXFP4: quant.pack_mxfp4_row,
    RowFormat.NVFP4: quant.pack_nvfp4_row,
}
_UNPACK = {
    RowFormat.FP8: quant.unpack_fp8_row,
    RowFormat.MXFP4: quant.unpack_mxfp4_row,
    RowFormat.NVFP4: quant.unpack_nvfp4_row,
}
ROUND_TRIP = {
    RowFormat.FP8: quant.fp8_round_trip,
    RowFormat.MXFP4: quant.mxfp4_round_trip,
    RowFormat.NVFP4: quant.nvfp4_round_trip,
}


@operation
def store_rows(cache: Tensor, slots: Tensor, values: Tensor, row_format: RowFormat) -> None:
    """cache[slots[i]] = values[i], packed when the cache is uint8. slots int [N] (no -1), values [N, dim]."""
    rows = _PACK[row_format](values) if cache.dtype == torch.uint8 else values.to(cache.dtype)
    size = cache.shape[1]
    cache[slots.div(size, rounding_mode="floor").long(), slots.remainder(size).long()] = rows


@operation
def load_rows(cache: Tensor, slots: Tensor, row_format: RowFormat, dim: int, dtype: torch.dtype) -> Tensor:
    """Values at slots int [...] -> dtype [..., dim]. A slot of -1 gives an arbitrary row: mask it."""
    size = cache.shape[1]
    slots = slots.clamp_min(0).long()
    rows = cache[slots.div(size, rounding_mode="floor"), slots.remainder(size)]
    return _UNPACK[row_format](rows, dim, dtype) if cache.dtype == torch.uint8 else rows.to(dtype)


@operation
def round_trip_rows(values: Tensor, cache: Tensor, row_format: RowFormat) -> Tensor:
    """What a reader of the cache would see after storing `values` [N, dim]: same shape and dtype."""
    if cache.dtype == torch.uint8:
        return ROUND_TRIP[row_format](values)
    return values.to(cache.dtype).to(values.dtype)
