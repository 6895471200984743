"""Addresses of a step: one launch instead of a dozen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference import step  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend


@triton.jit
def _entry_slots(positions, tables, owner, out, count, table_stride, entries, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    position = tl.load(positions + row * count + at, mask=inside, other=-1).to(tl.int32)
    table = tables + tl.load(owner + row).to(tl.int64) * table_stride
    block = tl.load(table + position // entries, mask=position >= 0, other=0)
    slot = tl.where(position >= 0, block * entries + position % entries, -1)
    tl.store(out + row * count + at, slot, mask=inside)


@backend("entry_slots", "cuda")
def entry_slots(positions: Tensor, block_tables: Tensor, sequence_of_row: Tensor, entries: int) -> Tensor:
    n, count = positions.shape
    out = torch.empty(n, count, dtype=torch.int32, device=positions.device)
    if out.numel():
        tables = block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()
        block = min(triton.next_power_of_2(count), 1024)
        _entry_slots[(n, triton.cdiv(count, block))](
            positions.contiguous(), tables, sequence_of_row.contiguous(), out, count, tables.stride(0), entries,
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out
