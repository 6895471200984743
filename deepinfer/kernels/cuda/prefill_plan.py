"""Addresses of a prefill step: two launches instead of two hundred.

The first N programs plan a row each, the S behind them a sequence each. Where a sequence's items begin among those of
all is a sum over the sequences in front of it, which every program works out again: S is small.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.common import contiguous
from deepinfer.kernels.reference import prefill_plan as reference  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend


@triton.jit
def _sequences(query_start, context_lens, num_sequences, SEQUENCES: tl.constexpr):
    """All sequences' last row + 1, tokens before and tokens after the step, int64 [SEQUENCES]."""
    sequence = tl.arange(0, SEQUENCES)
    inside = sequence < num_sequences
    first = tl.load(query_start + sequence, mask=inside, other=0).to(tl.int64)
    end = tl.load(query_start + sequence + 1, mask=inside, other=0).to(tl.int64)
    context = tl.load(context_lens + sequence, mask=inside, other=0).to(tl.int64)
    return tl.where(inside, end, 1 << 40), context - (end - first), context


@triton.jit
def _owner(pid, num_rows, ends):
    """The sequence of a row's program, or the one that a sequence's program plans."""
    return tl.where(pid < num_rows, tl.sum((ends <= pid).to(tl.int64)), pid - num_rows)


@triton.jit
def _in_front(counts, owner, SEQUENCES: tl.constexpr):
    """Sum of the counts of the sequences before `owner`."""
    return tl.sum(tl.where(tl.arange(0, SEQUENCES) < owner, counts, 0))


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "num_previous"])
def _window_plan(
    positions, query_start, context_lens, state_slots, keep_from, slots, previous_slots, stored_rows, stored_slots,
    num_rows, num_sequences, num_previous, window, ring,
    KEEPS: tl.constexpr, SEQUENCES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    ends, starts, contexts = _sequences(query_start, context_lens, num_sequences, SEQUENCES)
    owner = _owner(pid, num_rows, ends)
    first = tl.load(query_start + owner).to(tl.int64)
    end = tl.load(query_start + owner + 1).to(tl.int64)
    start = tl.load(context_lens + owner).to(tl.int64) - (end - first)
    base = tl.load(state_slots + owner).to(tl.int64) * ring
    previous = tl.minimum(start, window - 1)
    previous_before = _in_front(tl.minimum(starts, window - 1), owner, SEQUENCES)
    at = tl.arange(0, WINDOW)
    if pid < num_rows:
        position = tl.load(positions + pid)
        oldest = position * 0
        if KEEPS:
            kept = tl.load(keep_from + owner).to(tl.int64)
            oldest = tl.where(position >= kept, kept, 0)
        wanted = position - window + 1 + at
        from_new = num_previous + first + wanted - start
        from_previous = previous_before + previous + wanted - start
        slot = tl.where(wanted >= start, from_new, from_previous)
        tl.store(slots + pid * window + at, tl.where(wanted >= oldest, slot, -1).to(tl.int32), mask=at < window)
        stored_before = _in_front(tl.minimum(contexts - starts, ring), owner, SEQUENCES)
        index = pid - (end - tl.minimum(end - first, ring))
        tl.store(stored_rows + stored_before + index, pid, mask=index >= 0)
        tl.store(stored_slots + stored_before + index, base + position % ring, mask=index >= 0)
    else:
        slot = base + (start - previous + at) % ring
        tl.store(previous_slots + previous_before + at, slot, mask=at < previous)


@backend("window_plan", "cuda")
def window_plan(
    positions: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
    keep_from: Tensor | None,
    window: int,
    ring: int,
    num_previous: int,
    num_stored: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, sequences, device = len(positions), len(context_lens), positions.device
    slots = torch.empty(n, window, dtype=torch.int32, device=device)
    previous_slots = torch.empty(num_previous, dtype=torch.int64, device=device)
    stored = torch.empty(2, num_stored, dtype=torch.int64, device=device)
    kept = context_lens if keep_from is None else keep_from
    _window_plan[(n + sequences,)](
        *contiguous(positions, query_start, context_lens, state_slots, kept),
        slots, previous_slots, stored[0], stored[1], n, sequences, num_previous, window, ring,
        KEEPS=keep_from is not None, SEQUENCES=triton.next_power_of_2(sequences),
        WINDOW=triton.next_power_of_2(window), num_warps=4,
    )  # fmt: skip
    return slots, previous_slots, stored[0], stored[1]


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "num_groups", "num_pending", "num_kept"])
def _prefill_plan(
    positions, query_start, context_lens, state_slots, tables, frequencies,
    owners, states, rotations, group_rotations, visible, single_slots, members, group_slots, pending, sources, kept,
    num_rows, num_sequences, num_groups, num_pending, num_kept, table_stride, pairs, block_size, ngram, carry, history,
    RATIO: tl.constexpr, SEQUENCES: tl.constexpr, PAIRS: tl.constexpr, NGRAM: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    ends, starts, contexts = _sequences(query_start, context_lens, num_sequences, SEQUENCES)
    owner = _owner(pid, num_rows, ends)
    first = tl.load(query_start + owner).to(tl.int64)
    context = tl.load(context_lens + owner).to(tl.int64)
    end = tl.load(query_start + owner + 1).to(tl.int64)
    start = context - (end - first)
    state = tl.load(state_slots + owner).to(tl.int64)
    if pid < num_rows:
        position = tl.load(positions + pid)
        group, offset = position // RATIO, position % RATIO
        group_start = position - offset
        is_complete = offset == RATIO - 1
        groups_before = _in_front(contexts // RATIO - starts // RATIO, owner, SEQUENCES)
        at_group = groups_before + group - start // RATIO
        tl.store(owners + pid, owner.to(tl.int32))

        pair = tl.arange(0, PAIRS)
        for kind in tl.static_range(2):
            frequency = tl.load(frequencies + kind * pairs + pair, mask=pair < pairs, other=0.0)
            angle = position.to(tl.float64) * frequency
            target = rotations + (kind * num_rows + pid) * pairs + pair
            tl.store(target, tl.cos(angle).to(tl.float32), mask=pair < pairs)
            tl.store(target + 2 * num_rows * pairs, tl.sin(angle).to(tl.float32), mask=pair < pairs)
        frequency = tl.load(frequencies + pairs + pair, mask=pair < pairs, other=0.0)
        angle = group_start.to(tl.float64) * frequency
        target = group_rotations + at_group * pairs + pair
        tl.store(target, tl.cos(angle).to(tl.float32), mask=is_complete & (pair < pairs))
        tl.store(target + num_groups * pairs, tl.sin(angle).to(tl.float32), mask=is_complete & (pair < pairs))

        tl.store(visible + pid, (position + 1).to(tl.int32))
        tl.store(visible + num_rows + pid, ((position + 1) // RATIO).to(tl.int32))
        table, entries = tables + owner * table_stride, block_size // RATIO
        single = tl.load(table + position // block_size).to(tl.int64) * block_size + position % block_size
        tl.store(single_slots + pid, single)
        for place in tl.static_range(RATIO):
            wanted = group_start + place
            carried = num_rows + owner * carry + wanted % carry
            member = tl.where(wanted >= start, first + wanted - start, carried)
            tl.store(members + at_group * RATIO + place, member, mask=is_complete)
        pooled = tl.load(table + group // entries, mask=is_complete, other=0).to(tl.int64)
        tl.store(group_slots + at_group, pooled * entries + group % entries, mask=is_complete)

        all_open_from = tl.maximum(starts, contexts // RATIO * RATIO)
        open_from = tl.maximum(start, context // RATIO * RATIO)
        index = _in_front(contexts - all_open_from, owner, SEQUENCES) + position - open_from
        is_pending = position >= open_from
        tl.store(pending + index, pid, mask=is_pending)
        tl.store(pending + num_pending + index, state, mask=is_pending)
        tl.store(pending + 2 * num_pending + index, position % carry, mask=is_pending)

        back = tl.arange(0, NGRAM)
        earlier = position - back
        from_history = num_rows + owner * history + (earlier + history) % history  # operands of % must not be negative
        source = tl.where(earlier >= start, pid - back, from_history)
        source = tl.where(earlier >= 0, source, num_rows + num_sequences * history)
        tl.store(sources + pid * ngram + back, source, mask=back < ngram)
        kept_before = _in_front(tl.minimum(contexts - starts, history), owner, SEQUENCES)
        place = pid - (end - tl.minimum(end - first, history))
        tl.store(kept + kept_before + place, pid, mask=place >= 0)
        tl.store(kept + num_kept + kept_before + place, state, mask=place >= 0)
        tl.store(kept + 2 * num_kept + kept_before + place, position % history, mask=place >= 0)
    else:
        tl.store(states + owner, state)


@backend("prefill_plan", "cuda")
def prefill_plan(
    positions: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
    block_tables: Tensor,
    frequencies: Tensor,
    ratio: int,
    block_size: int,
    ngram: int,
    carry: int,
    history: int,
    wide: torch.dtype,
    num_groups: int,
    num_pending: int,
    num_kept: int,
) -> tuple[Tensor, ...]:
    if wide is not torch.float32:
        return NotImplemented
    n, sequences, pairs, device = len(positions), len(context_lens), frequencies.shape[1], positions.device

    def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    owners, visible = integers(n, dtype=torch.int32), integers(2, n, dtype=torch.int32)
    rotations = torch.empty(2, 2, n, pairs, dtype=wide, device=device)
    group_rotations = torch.empty(2, num_groups, pairs, dtype=wide, device=device)
    states, single_slots, group_slots = integers(sequences), integers(n), integers(num_groups)
    members, pending = integers(num_groups, ratio), integers(3, num_pending)
    sources, kept = integers(n, ngram), integers(3, num_kept)
    tables = block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()
    _prefill_plan[(n + sequences,)](
        *contiguous(positions, query_start, context_lens, state_slots), tables, frequencies.contiguous(),
        owners, states, rotations, group_rotations, visible, single_slots, members, group_slots, pending, sources, kept,
        n, sequences, num_groups, num_pending, num_kept, tables.stride(0), pairs, block_size, ngram, carry, history,
        RATIO=ratio, SEQUENCES=triton.next_power_of_2(sequences), PAIRS=triton.next_power_of_2(pairs),
        NGRAM=triton.next_power_of_2(ngram), num_warps=1,
    )  # fmt: skip
    return (
        owners, states, rotations, group_rotations, visible, single_slots, members, group_slots, pending, sources, kept
    )  # fmt: skip
