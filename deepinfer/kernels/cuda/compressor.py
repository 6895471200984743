"""Pooling of token groups: one launch for the means, one for what is carried on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference import compressor  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend

BLOCK = 128


@triton.jit
def _member(ab, carry, states, member, n, at, inside, dim, slot_stride, kept):
    """Values at channels `at` of one member: of a new row, or of a carried one."""
    is_new = member < n
    carried = tl.maximum(member - n, 0)
    slot = tl.load(states + carried // kept, mask=~is_new, other=0)
    new = tl.load(ab + member * 2 * dim + at, mask=inside & is_new, other=0.0)
    source = carry + slot * slot_stride + (carried % kept) * 2 * dim
    return tl.where(is_new, new, tl.load(source + at, mask=inside & ~is_new, other=0.0))


@triton.jit(do_not_specialize=["n"])
def _pool(ab, carry, states, members, out, n, dim, slot_stride, kept, RATIO: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < dim
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for place in tl.static_range(RATIO):
        member = tl.load(members + group * RATIO + place)
        gate = _member(ab, carry, states, member, n, dim + at, inside, dim, slot_stride, kept)
        best = tl.maximum(best, gate)
    total = tl.zeros((BLOCK,), tl.float32)
    result = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(RATIO):
        member = tl.load(members + group * RATIO + place)
        gate = _member(ab, carry, states, member, n, dim + at, inside, dim, slot_stride, kept)
        value = _member(ab, carry, states, member, n, at, inside, dim, slot_stride, kept)
        weight = tl.exp(gate - best)
        total += weight
        result += value * weight
    tl.store(out + group * dim + at, result / total, mask=inside)


@triton.jit
def _keep(ab, carry, rows, slots, offsets, width, slot_stride, BLOCK: tl.constexpr):
    pending = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, slot, offset = tl.load(rows + pending), tl.load(slots + pending), tl.load(offsets + pending)
    value = tl.load(ab + row * width + at, mask=at < width, other=0.0)
    tl.store(carry + slot * slot_stride + offset * width + at, value, mask=at < width)


@backend("pool_groups", "cuda")
def pool_groups(
    ab: Tensor,
    carry: Tensor,
    state_slots: Tensor,
    members: Tensor,
    pending_rows: Tensor,
    pending_slots: Tensor,
    pending_places: Tensor,
) -> Tensor:
    (groups, ratio), dim = members.shape, ab.shape[2]
    if ab.dtype != torch.float32 or carry.dtype != torch.float32 or carry.stride()[1:] != (2 * dim, dim, 1):
        return NotImplemented
    ab, slot_stride = ab.contiguous(), carry.stride(0)
    out = torch.empty(groups, dim, dtype=ab.dtype, device=ab.device)
    if groups:
        _pool[(groups, triton.cdiv(dim, BLOCK))](
            ab, carry, state_slots.contiguous(), members.contiguous(), out, len(ab), dim, slot_stride,
            carry.shape[1], RATIO=ratio, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    if len(pending_rows):
        _keep[(len(pending_rows), triton.cdiv(2 * dim, BLOCK))](
            ab, carry, pending_rows.contiguous(), pending_slots.contiguous(), pending_places.contiguous(), 2 * dim,
            slot_stride, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out
