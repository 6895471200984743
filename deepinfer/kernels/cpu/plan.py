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


@backend("decode_plan", "cpu")
def decode_plan(
    positions: Tensor,
    state_slots: Tensor,
    block_tables: Tensor,
    frequencies: Tensor,
    ratio: int,
    block_size: int,
    window: int,
    ring: int,
    ngram: int,
    carry: int,
    history: int,
    wide: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    kernels = functions()
    if kernels is None or block_tables.dtype is not torch.int32 or block_tables.stride(1) != 1:
        return NotImplemented
    positions, states, n = positions.contiguous(), state_slots.long().contiguous(), len(positions)
    window_slots, visible = torch.empty(n, window, dtype=torch.int32), torch.empty(2, n, dtype=torch.int32)
    sources, members, slots = (torch.empty(shape, dtype=torch.int64) for shape in ((n, ngram), (n, ratio), (7, n)))
    kernels["decode_plan"](
        positions.data_ptr(), states.data_ptr(), block_tables.data_ptr(), block_tables.stride(0), n, ratio, block_size,
        window, ring, ngram, carry, history, window_slots.data_ptr(), sources.data_ptr(), members.data_ptr(),
        slots.data_ptr(), visible.data_ptr(),
    )  # fmt: skip
    rotations = step.decode_rotations(positions, frequencies, ratio, wide)
    return rotations, window_slots, sources, members, slots, visible


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
    if any(t.dtype is not torch.int64 for t in indices):
        return NotImplemented
    state_slots, members, pending_rows, pending_slots, pending_places = (t.contiguous() for t in indices)
    (n, _, dim), (groups, ratio), places = ab.shape, members.shape, carry.shape[1]
    out = torch.empty(groups, dim, dtype=torch.float32)
    kernels["pool_groups"](
        ab.data_ptr(), n, carry.data_ptr(), carry.stride(0), places, state_slots.data_ptr(), dim, members.data_ptr(),
        groups, ratio, pending_rows.data_ptr(), pending_slots.data_ptr(), pending_places.data_ptr(),
        len(pending_rows), out.data_ptr(),
    )  # fmt: skip
    return out
