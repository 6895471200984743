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


@triton.jit
def _window_slots(positions, states, out, window, ring, WINDOW: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WINDOW)
    wanted = tl.load(positions + row).to(tl.int64) - window + 1 + at
    slot = tl.where(wanted >= 0, tl.load(states + row).to(tl.int64) * ring + wanted % ring, -1)
    tl.store(out + row * window + at, slot.to(tl.int32), mask=at < window)


@backend("window_slots", "cuda")
def window_slots(positions: Tensor, state_slots: Tensor, window: int, ring: int) -> Tensor:
    out = torch.empty(len(positions), window, dtype=torch.int32, device=positions.device)
    if out.numel():
        _window_slots[(len(positions),)](
            positions.contiguous(), state_slots.contiguous(), out, window, ring,
            WINDOW=triton.next_power_of_2(window), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _source(positions, states, row, position, state, back, n, size):
    """Where the token `back` before the row's is: a new row of this step, or one of `size` kept ones."""
    inside = row >= back
    other_state = tl.load(states + row - back, mask=inside, other=-1).to(tl.int64)
    other_position = tl.load(positions + row - back, mask=inside, other=-1)
    is_new = inside & (other_state == state) & (other_position == position - back)
    kept = (position - back + size) % size  # operands of % must not be negative here, unlike in Python
    return tl.where(is_new, row - back, n + row * size + kept)


@triton.jit(do_not_specialize=["n"])  # one kernel for every batch size
def _decode_plan(
    positions, states, tables, frequencies, rotations, window_slots, ngram_source, members, slots, visible,
    n, table_stride, pairs, block_size, window, ring, ngram, carry, history,
    RATIO: tl.constexpr, PAIRS: tl.constexpr, WINDOW: tl.constexpr, NGRAM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    state = tl.load(states + row).to(tl.int64)
    group = position // RATIO
    offset = position % RATIO
    is_complete = offset == RATIO - 1

    pair = tl.arange(0, PAIRS)
    for kind in tl.static_range(3):
        frequency = tl.load(frequencies + (pairs if kind > 0 else 0) + pair, mask=pair < pairs, other=0.0)
        start = position - offset if kind == 2 else position
        angle = start.to(tl.float64) * frequency
        target = rotations + (kind * n + row) * pairs + pair
        tl.store(target, tl.cos(angle).to(tl.float32), mask=pair < pairs)
        tl.store(target + 3 * n * pairs, tl.sin(angle).to(tl.float32), mask=pair < pairs)

    at = tl.arange(0, WINDOW)
    wanted = position - window + 1 + at
    slot = tl.where(wanted >= 0, state * ring + wanted % ring, -1)
    tl.store(window_slots + row * window + at, slot.to(tl.int32), mask=at < window)

    back = tl.arange(0, NGRAM)
    source = _source(positions, states, row, position, state, back, n, history)
    source = tl.where(position >= back, source, n * (1 + history))
    tl.store(ngram_source + row * ngram + back, source, mask=back < ngram)

    place = tl.arange(0, RATIO)
    member = _source(positions, states, row, position, state, RATIO - 1 - place, n, carry)
    tl.store(members + row * RATIO + place, member)

    table = tables + row * table_stride
    entries = block_size // RATIO
    single = tl.load(table + position // block_size).to(tl.int64) * block_size + position % block_size
    pooled = tl.load(table + group // entries).to(tl.int64) * entries + group % entries
    tl.store(slots + row, state)
    tl.store(slots + n + row, state * ring + position % ring)
    tl.store(slots + 2 * n + row, single)
    tl.store(slots + 3 * n + row, tl.where(is_complete, pooled, 0))
    tl.store(slots + 4 * n + row, tl.where(is_complete, 0, state))
    tl.store(slots + 5 * n + row, position % carry)
    tl.store(slots + 6 * n + row, position % history)
    tl.store(visible + row, (position + 1).to(tl.int32))
    tl.store(visible + n + row, (group + tl.where(is_complete, 1, 0)).to(tl.int32))


@backend("decode_plan", "cuda")
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
) -> tuple[Tensor, ...]:
    if wide is not torch.float32:
        return NotImplemented
    n, pairs, device = len(positions), frequencies.shape[1], positions.device
    rotations = torch.empty(2, 3, n, pairs, dtype=wide, device=device)
    window_slots = torch.empty(n, window, dtype=torch.int32, device=device)
    ngram_source = torch.empty(n, ngram, dtype=torch.int64, device=device)
    members = torch.empty(n, ratio, dtype=torch.int64, device=device)
    slots = torch.empty(7, n, dtype=torch.int64, device=device)
    visible = torch.empty(2, n, dtype=torch.int32, device=device)
    tables = block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()
    _decode_plan[(n,)](
        positions.contiguous(), state_slots.contiguous(), tables, frequencies.contiguous(),
        rotations, window_slots, ngram_source, members, slots, visible,
        n, tables.stride(0), pairs, block_size, window, ring, ngram, carry, history,
        RATIO=ratio, PAIRS=triton.next_power_of_2(pairs), WINDOW=triton.next_power_of_2(window),
        NGRAM=triton.next_power_of_2(ngram), num_warps=4,
    )  # fmt: skip
    return rotations, window_slots, ngram_source, members, slots, visible
