"""CPU kernels of what a step plans and pools: addresses in paged caches, token groups."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.cpu.library import functions, ready
from deepinfer.kernels.reference import compressor, step  # noqa: F401  (define the operations)
from deepinfer.kernels.registry import backend


@backend("entry_slots", "cpu")
def entry_slots(positions: Tensor, block_tables: Tensor, sequence_of_row: Tensor, entries: int) -> Tensor:
    kernels = functions()
    if kernels is None or block_tables.dtype is not torch.int32 or block_tables.stride(1) != 1:
        return NotImplemented
    positions, owner = positions.to(torch.int32).contiguous(), sequence_of_row.to(torch.int32).contiguous()
    n, k = positions.shape
    out = torch.empty(n, k, dtype=torch.int32)
    kernels["entry_slots"](
        positions.data_ptr(), n, k, block_tables.data_ptr(), block_tables.stride(0), owner.data_ptr(), entries,
        out.data_ptr(),
    )  # fmt: skip
    return out


@backend("pool_groups", "cpu")
def pool_groups(
    ab: Tensor,
    carry: Tensor,
    state_slots: Tensor,
    members: Tensor,
    pending_rows: Tensor,
    pending_slots: Tensor,
    pending_places: Tensor,
) -> Tensor:
    kernels = functions()
    indices = (state_slots, members, pending_rows, pending_slots, pending_places)
    if kernels is None or not ready(ab) or carry.dtype is not torch.float32 or not carry[:1].is_contiguous():
        return NotImplemented
    if not all(t.dtype is torch.int64 and t.is_contiguous() for t in indices):
        return NotImplemented
    (n, _, dim), (groups, ratio), places = ab.shape, members.shape, carry.shape[1]
    out = torch.empty(groups, dim, dtype=torch.float32)
    kernels["pool_groups"](
        ab.data_ptr(), n, carry.data_ptr(), carry.stride(0), places, state_slots.data_ptr(), dim, members.data_ptr(),
        groups, ratio, pending_rows.data_ptr(), pending_slots.data_ptr(), pending_places.data_ptr(),
        len(pending_rows), out.data_ptr(),
    )  # fmt: skip
    return out
