"""StepMetadata of a decode step: one row a sequence, and nothing whose shape depends on values.

Every shape follows from the number of rows and the width of the block table; nothing is read back from the device and
nothing is compacted, so the step can be captured in a CUDA graph. What a row has no use for goes to the null block or
the null slot instead. A padding row (state slot 0, block table of zeros, position 0, context_len 1) writes only there.

The plan is made of small tensors, so that its cost is the number of operations: they are few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.models.inputs import ModelInputs
from deepinfer.models.layers.step import CompressionPlan, Rotation, StepMetadata, WindowPlan


def decode_metadata(
    inputs: ModelInputs,
    config: ModelConfig,
    frequencies: dict[bool, Tensor],
    block_size: int,
    wide: torch.dtype,
    ring_size: int | None = None,
) -> StepMetadata:
    """Like StepMetadata.build, for a decode step."""
    ring_size = ring_size or config.ring_size
    positions, state_slots = inputs.positions, inputs.state_slots.long()
    sequence_of_row = inputs.query_start[:-1]  # one token each: 0, 1, 2, ...
    rows = sequence_of_row.long()
    ratios = sorted({config.compress_ratios[layer] for layer in config.kv_source_layer_ids})
    offsets = {ratio: positions % ratio for ratio in ratios if ratio > 1}
    plain, compressed, *of_groups = _rotations(
        [positions, positions, *(positions - offset for offset in offsets.values())], frequencies, wide
    )
    group_rotations = dict(zip(offsets, of_groups, strict=True))
    ngram = _ngram_source(rows, positions, max(config.engram_max_ngram_size, 2))
    return StepMetadata(
        inputs=inputs,
        sequence_of_row=sequence_of_row,
        state_slots=state_slots,
        rotations={False: plain, True: compressed},
        window=_window_plan(positions, state_slots, config.sliding_window, ring_size),
        compression={
            ratio: _compression_plan(
                ratio,
                rows,
                positions,
                offsets.get(ratio),
                state_slots,
                inputs.block_tables,
                block_size // ratio,
                group_rotations.get(ratio, compressed),
            )
            for ratio in ratios
        },
        ngram_source=ngram,
        history_source=ngram[:, :-1],  # the history of the next token is what this one's n-gram is made of
        block_size=block_size,
        ring_size=ring_size,
    )


def _rotations(positions: list[Tensor], frequencies: dict[bool, Tensor], wide: torch.dtype) -> list[Rotation]:
    """Plain frequencies for the first positions int64 [N], those of compressed layers for the others."""
    by_kind = torch.stack([frequencies[index > 0] for index in range(len(positions))])  # [kinds, pairs]
    angles = torch.stack(positions).to(torch.float64).unsqueeze(2) * by_kind.unsqueeze(1)
    return [Rotation(cos, sin) for cos, sin in zip(angles.cos().to(wide), angles.sin().to(wide), strict=True)]


def _window_plan(positions: Tensor, state_slots: Tensor, window: int, ring: int) -> WindowPlan:
    base = (state_slots * ring).unsqueeze(1)
    wanted = positions.unsqueeze(1) + torch.arange(1 - window, 1, device=positions.device)  # [N, W]
    slots = base + wanted % ring
    return WindowPlan(
        from_ring=True,
        slots=slots.masked_fill(wanted < 0, -1).to(torch.int32),
        previous_slots=None,
        stored_rows=None,
        stored_slots=slots[:, -1].contiguous(),
    )


def _compression_plan(
    ratio: int,
    rows: Tensor,
    positions: Tensor,
    offset: Tensor | None,
    state_slots: Tensor,
    block_tables: Tensor,
    entries: int,
    rotation: Rotation,
) -> CompressionPlan:
    """Row i's candidate is the group of its own token, at `offset` (None: 0) in it.

    A group that stays open is pooled from whatever the carry holds and stored in the null block, which nobody reads.
    """
    group = positions if offset is None else positions // ratio
    group_slots = torch.gather(block_tables, 1, (group // entries).unsqueeze(1)).squeeze(1) * entries + group % entries
    if offset is None:  # every token is a group
        visible = (positions + 1).to(torch.int32)
        return CompressionPlan(visible, rows.unsqueeze(1), group_slots, rotation, rows[:0], rows[:0], rows[:0])
    is_complete = offset == ratio - 1
    carried = [rows * ratio + (len(rows) + place) for place in range(ratio - 1)]
    return CompressionPlan(
        visible=(group + is_complete).to(torch.int32),
        members=torch.stack((*carried, rows), dim=1),
        group_slots=group_slots.masked_fill(~is_complete, 0),
        rotation=rotation,
        pending_rows=rows,
        pending_slots=state_slots.masked_fill(is_complete, 0),
        pending_offsets=offset,
    )


def _ngram_source(rows: Tensor, positions: Tensor, ngram: int) -> Tensor:
    """int64 [N, n] into [N new rows | N * (n - 1) history ids, latest first | boundary]."""
    num_rows = len(rows)
    boundary = num_rows * ngram
    history = rows * (ngram - 1) + num_rows
    earlier = [(history + (back - 1)).masked_fill(positions < back, boundary) for back in range(1, ngram)]
    return torch.stack((rows, *earlier), dim=1)
