"""Where the rows of a prefill step read and write: N rows of S sequences, any number of each.

The host knows how many items each plan has (models/layers/step.py), so no size is asked of the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.registry import operation


@dataclass(frozen=True)
class Geometry:
    """Rows and sequences of a step, all int64."""

    positions: Tensor  # [N]
    owner: Tensor  # [N] sequence of each row
    query_start: Tensor  # [S + 1]
    start: Tensor  # [S] tokens in the cache before the step
    context: Tensor  # [S] and after it
    state_slots: Tensor  # [S]

    @classmethod
    def of(cls, positions: Tensor, query_start: Tensor, context_lens: Tensor, state_slots: Tensor) -> Geometry:
        query_start, context = query_start.long(), context_lens.long()
        counts = query_start.diff()
        owner = torch.arange(len(counts), device=counts.device)
        owner = torch.repeat_interleave(owner, counts, output_size=len(positions))
        return cls(positions, owner, query_start, context - counts, context, state_slots.long())

    def row_of(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Row of a position that belongs to this step (position >= start of its sequence)."""
        return self.query_start[sequence] + position - self.start[sequence]

    def last_rows(self, counts: Tensor, total: int) -> Tensor:
        """Rows of the last counts[s] tokens of each sequence, ascending; `total` of them."""
        sequence, offset = expand(counts, total)
        return (self.query_start[1:] - counts)[sequence] + offset


def expand(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Sequence and running index of `total` = sum(counts) items, counts[s] of sequence s."""
    owner = torch.arange(len(counts), device=counts.device)
    owner = torch.repeat_interleave(owner, counts, output_size=total)
    offset = torch.arange(len(owner), device=counts.device) - (counts.cumsum(0) - counts)[owner]
    return owner, offset


@operation
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
    """The sliding window of a prefill step, read from [P previous rows | N new rows], kept in rings of `ring` slots.

    positions int64 [N], query_start int32 [S + 1], context_lens and state_slots int32 [S]; keep_from int32 [S]: a row
    at or after it sees nothing before it; None: 0. P = num_previous = sum(min(start, window - 1)), num_stored =
    sum(min(tokens in the step, ring)). Returns

    - slots, int32 [N, window] into that buffer, -1 where a row sees nothing
    - previous slots, int64 [P]: ring slots of the previous rows
    - stored rows and stored slots, int64 [num_stored] each: rows that stay, and their ring slots
    """
    g = Geometry.of(positions, query_start, context_lens, state_slots)
    ring_base = (g.state_slots * ring)[g.owner]
    previous = g.start.clamp_max(window - 1)
    sequence, offset = expand(previous, num_previous)
    previous_slots = (g.state_slots * ring)[sequence] + ((g.start - previous)[sequence] + offset) % ring

    wanted = positions.unsqueeze(1) + torch.arange(1 - window, 1, device=positions.device)  # [N, window]
    oldest = torch.zeros_like(positions)
    if keep_from is not None:
        oldest = keep_from.long()[g.owner]
        oldest = torch.where(positions >= oldest, oldest, 0)
    start = g.start[g.owner].unsqueeze(1)
    from_new = num_previous + g.row_of(g.owner.unsqueeze(1), wanted)
    from_previous = previous.cumsum(0)[g.owner].unsqueeze(1) + wanted - start
    slots = torch.where(wanted >= start, from_new, from_previous)
    slots = torch.where(wanted >= oldest.unsqueeze(1), slots, -1)

    stored_rows = g.last_rows((g.context - g.start).clamp_max(ring), num_stored)
    stored_slots = ring_base[stored_rows] + positions[stored_rows] % ring
    return slots.to(torch.int32), previous_slots, stored_rows, stored_slots


@operation
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
    """What the rows of a prefill step need beside their window (models/layers/step.py).

    Two kinds of compression are planned, as in decode_plan: every token a group, and groups of `ratio` tokens, of which
    the step completes num_groups; num_pending rows belong to groups that stay open.

    Arguments as in window_plan; block_tables int32 [S, max_blocks], frequencies float64 [2, pairs] of plain and of
    compressed layers; `ngram` ids make an n-gram. A compressor keeps `carry` tokens and the state `history` compressed
    ids, a token at position % size; num_kept = sum(min(tokens in the step, history)). Returns

    - owner int32 [N]: the sequence of each row; state slots int64 [S]
    - rotations, `wide` [cos | sin, plain | compressed, N, pairs] at each position
    - rotations, `wide` [cos | sin, num_groups, pairs]: compressed, at the start of each group of `ratio`
    - visible, int32 [2, N]: groups of 1 and of `ratio` that each row may see
    - slots int64 [N] of the groups of 1, one a row
    - members, int64 [num_groups, ratio] into [N new rows | S * carry carried rows]; group slots int64 [num_groups]
    - pending, int64 [3, num_pending]: row, state slot, place in the carry
    - n-gram sources, int64 [N, ngram] token itself first, into [N new rows | S * history ids | boundary]
    - kept, int64 [3, num_kept]: row, state slot, place in the history of the last tokens of each sequence
    """
    g = Geometry.of(positions, query_start, context_lens, state_slots)
    num_rows, entries = len(positions), block_size // ratio

    def rotation(at: Tensor, frequency: Tensor) -> Tensor:
        angles = at.to(torch.float64).unsqueeze(1) * frequency
        return torch.stack((angles.cos(), angles.sin())).to(wide)

    single_slots = block_tables[g.owner, positions // block_size].long() * block_size + positions % block_size

    first_group = g.start // ratio
    sequence, offset = expand(g.context // ratio - first_group, num_groups)
    group, column = first_group[sequence] + offset, sequence.unsqueeze(1)
    position = group.unsqueeze(1) * ratio + torch.arange(ratio, device=group.device)  # [groups, ratio]
    carried = num_rows + column * carry + position % carry
    members = torch.where(position >= g.start[column], g.row_of(column, position), carried)
    group_slots = block_tables[sequence, group // entries].long() * entries + group % entries

    open_from = torch.maximum(g.start, g.context // ratio * ratio)
    pending_rows = g.last_rows(g.context - open_from, num_pending)
    pending = torch.stack((pending_rows, g.state_slots[g.owner[pending_rows]], positions[pending_rows] % carry))

    back = torch.arange(ngram, device=positions.device)
    earlier, sequence = positions.unsqueeze(1) - back, g.owner.unsqueeze(1)  # [N, ngram]
    kept = num_rows + sequence * history + earlier % history
    sources = torch.where(earlier >= g.start[sequence], g.row_of(sequence, earlier), kept)
    sources = torch.where(earlier >= 0, sources, num_rows + len(g.start) * history)
    kept_rows = g.last_rows((g.context - g.start).clamp_max(history), num_kept)
    return (
        g.owner.to(torch.int32),
        g.state_slots,
        torch.stack((rotation(positions, frequencies[0]), rotation(positions, frequencies[1])), dim=1),
        rotation(group * ratio, frequencies[1]),
        torch.stack((positions + 1, (positions + 1) // ratio)).to(torch.int32),
        single_slots,
        members,
        group_slots,
        pending,
        sources,
        torch.stack((kept_rows, g.state_slots[g.owner[kept_rows]], positions[kept_rows] % history)),
    )
