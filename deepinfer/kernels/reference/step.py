"""Where a step reads and writes: addresses in paged caches."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.registry import operation


@operation
def entry_slots(positions: Tensor, block_tables: Tensor, sequence_of_row: Tensor, entries: int) -> Tensor:
    """Physical slots of compressed positions in a cache of `entries` a block; -1 stays -1.

    positions int [N, K], block_tables int32 [S, max_blocks], sequence_of_row int [N] -> int32 [N, K].
    """
    tables = block_tables[sequence_of_row.long().unsqueeze(1), positions.clamp_min(0) // entries]
    return torch.where(positions >= 0, tables * entries + positions % entries, -1).to(torch.int32)


@operation
def window_slots(positions: Tensor, state_slots: Tensor, window: int, ring: int) -> Tensor:
    """Slots of the last `window` tokens up to each position, in rings of `ring` slots, one a state slot.

    positions int [N], state_slots int [N] -> int32 [N, window], oldest first, -1 before the first token.
    """
    wanted = positions.long().unsqueeze(1) + torch.arange(1 - window, 1, device=positions.device)
    slots = (state_slots.long() * ring).unsqueeze(1) + wanted % ring
    return slots.masked_fill(wanted < 0, -1).to(torch.int32)


def decode_rotations(positions: Tensor, frequencies: Tensor, ratio: int, wide: torch.dtype) -> Tensor:
    """The rotations of `decode_plan`."""
    starts = torch.stack((positions, positions, positions - positions % ratio)).to(torch.float64).unsqueeze(2)
    angles = starts * torch.stack((frequencies[0], frequencies[1], frequencies[1])).unsqueeze(1)
    return torch.stack((angles.cos(), angles.sin())).to(wide)


@operation
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
    """Where the N rows of a decode step read and write (models/layers/decode_step.py).

    Rows of one sequence (equal state slots) lie side by side, at consecutive positions; all inputs have an entry a row.
    Two kinds of compression are planned: every token a group, and groups of `ratio` tokens. A row's candidate is the
    group of its own token; where it stays open, its slot is in the null block 0, else the pending slot is 0.

    positions int64 [N], state_slots int32 [N], block_tables int32 [N, max_blocks], frequencies float64 [2, pairs] of
    plain and of compressed layers; `ring` slots hold a window, `carry` a compressor's tokens and `history` compressed
    ids, of which `ngram` make an n-gram: rings, a token at position % size. Returns

    - rotations, `wide` [cos | sin, 3, N, pairs]: plain and compressed at the position, compressed at the group's start
    - window slots, int32 [N, window], -1 before the first token
    - n-gram sources, int64 [N, ngram], token itself first, into [N new rows | N * history ids | boundary]
    - members, int64 [N, ratio] into [N new rows | N * carry carried rows], the tokens of the group
    - slots, int64 [7, N]: state, ring slot of the token, groups of 1, groups of `ratio`, pending, place in the carry,
      place in the history
    - visible, int32 [2, N]: groups of 1 and of `ratio` that the row may see
    """
    num_rows, device = len(positions), positions.device
    rows, states = torch.arange(num_rows, device=device), state_slots.long()
    group, offset = positions // ratio, positions % ratio
    is_complete = offset == ratio - 1

    wanted = positions.unsqueeze(1) + torch.arange(1 - window, 1, device=device)
    ring_slots = (states * ring).unsqueeze(1) + wanted % ring

    def source(back: int, size: int) -> Tensor:
        """Where the token `back` before each row's is: a new row of this step, or one of `size` kept ones."""
        is_new = (states.roll(back) == states) & (positions.roll(back) == positions - back) & (rows >= back)
        return torch.where(is_new, rows - back, rows * size + (num_rows + (positions - back) % size))

    boundary = num_rows * (1 + history)
    earlier = [source(back, history).masked_fill(positions < back, boundary) for back in range(1, ngram)]
    members = [source(back, carry) for back in range(ratio - 1, 0, -1)]

    def group_slots(groups: Tensor, entries: int) -> Tensor:
        blocks = torch.gather(block_tables, 1, (groups // entries).unsqueeze(1)).squeeze(1)
        return blocks * entries + groups % entries

    pooled = group_slots(group, block_size // ratio).masked_fill(~is_complete, 0)
    pending = states.masked_fill(is_complete, 0)
    singles = group_slots(positions, block_size)
    places = positions % carry, positions % history
    return (
        decode_rotations(positions, frequencies, ratio, wide),
        ring_slots.masked_fill(wanted < 0, -1).to(torch.int32),
        torch.stack((rows, *earlier), dim=1),
        torch.stack((*members, rows), dim=1),
        torch.stack((states, ring_slots[:, -1], singles, pooled, pending, *places)),
        torch.stack((positions + 1, group + is_complete)).to(torch.int32),
    )
