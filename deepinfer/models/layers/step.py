"""StepMetadata: where every row of a step reads and writes, worked out once and shared by all layers.

Slots are flat indices into a cache view: page * page_size + offset (see kernels/reference/cache_rows.py).
N query rows of S sequences; `start` is the number of tokens of a sequence that were in the cache before this step.

A decode step, whose shapes depend on nothing but N, is planned in decode_step.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.kernels import ops
from deepinfer.models.inputs import HostLengths, ModelInputs


@dataclass(frozen=True)
class Rotation:
    """cos and sin, at least float32 [N, pairs]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotation:
        angles = positions.to(torch.float64).unsqueeze(1) * frequencies
        return cls(angles.cos().to(dtype), angles.sin().to(dtype))


@dataclass(frozen=True)
class WindowPlan:
    """Sliding window. In a decode step the rows are stored first and the window is read from the ring itself; in a
    prefill step a chunk may be longer than the ring, so the window is read from a buffer [previous rows | new rows] and
    the ring is written afterwards."""

    from_ring: bool
    slots: Tensor  # int32 [N, W] into the ring or the buffer, -1 before the sequence's first token
    previous_slots: Tensor | None  # int64 [P] ring slots that go in front of the new rows (prefill)
    stored_rows: Tensor | None  # int64 rows whose latents stay in the ring; None: all
    stored_slots: Tensor  # int64 ring slots they go to


@dataclass(frozen=True)
class CompressionPlan:
    """Groups that this step completes, for one compress ratio; in a decode step one candidate a row."""

    visible: Tensor  # int32 [N] groups that each row may see
    members: Tensor  # int64 [groups, ratio] rows of [new rows | carried rows], the tokens of each group
    group_slots: Tensor  # int64 [groups] where their latent and index key go
    rotation: Rotation  # at the first token of each group
    pending_rows: Tensor  # int64 [pending] new rows whose group is still open; in a decode step every row
    pending_slots: Tensor  # int64 [pending] state slot of each; the null slot where the group is complete
    pending_offsets: Tensor  # int64 [pending] place of each inside its group


@dataclass(frozen=True)
class StepMetadata:
    """Made once a step: by `build` for prefill, by decode_step.decode_metadata for decoding."""

    inputs: ModelInputs
    sequence_of_row: Tensor  # int32 [N]
    state_slots: Tensor  # int64 [S]
    rotations: dict[bool, Rotation]  # compressed layer? -> at each row's position
    window: WindowPlan
    compression: dict[int, CompressionPlan]  # by ratio
    ngram_source: Tensor  # int64 [N, n] into [new rows | history rows | boundary], token itself first
    history_source: Tensor  # int64 [S, n - 1] into the same: what the history becomes
    block_size: int
    ring_size: int

    @classmethod
    def build(
        cls,
        inputs: ModelInputs,
        config: ModelConfig,
        frequencies: dict[bool, Tensor],
        block_size: int,
        wide: torch.dtype,
        ring_size: int | None = None,
    ) -> StepMetadata:
        """Of a prefill step.

        `frequencies` by "is the layer compressed" (rope_frequencies), on the device; `wide` is at least float32.
        `ring_size` is that of the state cache; None: the smallest there is, config.ring_size.
        """
        ring_size = ring_size or config.ring_size
        geometry = Geometry.of(inputs)
        ratios = {config.compress_ratios[layer] for layer in config.kv_source_layer_ids}
        ngram, history = _engram_sources(geometry, max(config.engram_max_ngram_size, 2))
        return cls(
            inputs=inputs,
            sequence_of_row=geometry.owner.to(torch.int32),
            state_slots=geometry.state_slots,
            rotations={kind: Rotation.at(inputs.positions, f, wide) for kind, f in frequencies.items()},
            window=window_plan(geometry, config.sliding_window, ring_size, inputs.is_prefill),
            compression={
                ratio: _compression_plan(geometry, ratio, block_size, inputs.block_tables, frequencies[True], wide)
                for ratio in ratios
            },
            ngram_source=ngram,
            history_source=history,
            block_size=block_size,
            ring_size=ring_size,
        )

    def cache_slots(self, positions: Tensor, entries: int) -> Tensor:
        """Physical slots of compressed positions int32 [N, K] (-1 kept) in a cache of `entries` a block."""
        return ops.entry_slots(positions, self.inputs.block_tables, self.sequence_of_row, entries)


@dataclass(frozen=True)
class Geometry:
    """Rows and sequences of a step, all int64. Sizes of a prefill step come from the host's `lengths`."""

    positions: Tensor  # [N]
    owner: Tensor  # [N] sequence of each row
    query_start: Tensor  # [S + 1]
    start: Tensor  # [S]
    context: Tensor  # [S]
    state_slots: Tensor  # [S]
    lengths: HostLengths | None  # None in a decode step

    @classmethod
    def of(cls, inputs: ModelInputs) -> Geometry:
        query_start, context = inputs.query_start.long(), inputs.context_lens.long()
        counts = query_start.diff()
        start = context - counts
        owner, lengths = torch.arange(len(counts), device=counts.device), None
        if inputs.is_prefill:
            owner = torch.repeat_interleave(owner, counts, output_size=len(inputs.positions))
            lengths = inputs.lengths or _read_lengths(inputs, start, counts)
        return cls(inputs.positions, owner, query_start, start, context, inputs.state_slots.long(), lengths)

    def row_of(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Row of a position that belongs to this step (position >= start of its sequence)."""
        return self.query_start[sequence] + position - self.start[sequence]

    def last_rows(self, counts: Tensor, total: int) -> Tensor:
        """Rows of the last counts[s] tokens of each sequence, ascending; `total` of them."""
        sequence, offset = expand(counts, total)
        return (self.query_start[1:] - counts)[sequence] + offset


def _read_lengths(inputs: ModelInputs, start: Tensor, counts: Tensor) -> HostLengths:
    """The lengths from the device. Waits for it."""
    keep_from = start if inputs.keep_from is None else inputs.keep_from.long()
    kept = (start + counts - torch.maximum(keep_from, start)).clamp_min(0)
    return HostLengths(*torch.stack((start, counts, kept)).cpu().numpy())


def expand(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Sequence and running index of `total` = sum(counts) items, counts[s] of sequence s."""
    owner = torch.arange(len(counts), device=counts.device)
    owner = torch.repeat_interleave(owner, counts, output_size=total)
    offset = torch.arange(len(owner), device=counts.device) - (counts.cumsum(0) - counts)[owner]
    return owner, offset


def window_plan(g: Geometry, window: int, ring: int, is_prefill: bool, oldest: Tensor | None = None) -> WindowPlan:
    """Window of `window` tokens, kept in rings of `ring` slots (at least `window`).

    oldest: int64 [N], in a prefill step the first position that each row may see; None: 0.
    """
    wanted = g.positions.unsqueeze(1) + torch.arange(1 - window, 1, device=g.positions.device)  # [N, W]
    ring_base = (g.state_slots * ring)[g.owner]
    if not is_prefill:
        slots = torch.where(wanted >= 0, ring_base.unsqueeze(1) + wanted % ring, -1)
        return WindowPlan(True, slots.to(torch.int32), None, None, ring_base + g.positions % ring)
    assert g.lengths is not None
    num_previous = g.start.clamp_max(window - 1)
    sequence, offset = expand(num_previous, int(np.minimum(g.lengths.start, window - 1).sum()))
    previous_positions = (g.start - num_previous)[sequence] + offset
    previous_slots = (g.state_slots * ring)[sequence] + previous_positions % ring
    first_previous = num_previous.cumsum(0) - num_previous
    start, owner = g.start[g.owner].unsqueeze(1), g.owner.unsqueeze(1)
    from_new = len(previous_slots) + g.row_of(owner, wanted)
    from_previous = (first_previous + num_previous)[g.owner].unsqueeze(1) + wanted - start
    slots = torch.where(wanted >= start, from_new, from_previous)
    slots = torch.where(wanted >= (0 if oldest is None else oldest.unsqueeze(1)), slots, -1)
    counts, num_stored = g.context - g.start, int(np.minimum(g.lengths.count, ring).sum())
    stored_rows = g.last_rows(counts.clamp_max(ring), num_stored)
    stored_slots = ring_base[stored_rows] + g.positions[stored_rows] % ring
    return WindowPlan(False, slots.to(torch.int32), previous_slots, stored_rows, stored_slots)


def _compression_plan(
    g: Geometry, ratio: int, block_size: int, block_tables: Tensor, frequencies: Tensor, dtype: torch.dtype
) -> CompressionPlan:
    assert g.lengths is not None
    num_rows = len(g.positions)
    start, context = g.lengths.start, g.lengths.start + g.lengths.count
    first_group = g.start // ratio
    sequence, offset = expand(g.context // ratio - first_group, int((context // ratio - start // ratio).sum()))
    group = first_group[sequence] + offset
    position = group.unsqueeze(1) * ratio + torch.arange(ratio, device=group.device)  # [groups, ratio]
    column = sequence.unsqueeze(1)
    carried = num_rows + column * ratio + position % ratio
    members = torch.where(position >= g.start[column], g.row_of(column, position), carried)
    entries = block_size // ratio
    group_slots = block_tables[sequence, group // entries].long() * entries + group % entries
    open_from = torch.maximum(g.start, g.context // ratio * ratio)
    num_pending = int((context - np.maximum(start, context // ratio * ratio)).sum())
    pending_rows = g.last_rows(g.context - open_from, num_pending)
    return CompressionPlan(
        visible=((g.positions + 1) // ratio).to(torch.int32),
        members=members,
        group_slots=group_slots,
        rotation=Rotation.at(group * ratio, frequencies, dtype),
        pending_rows=pending_rows,
        pending_slots=g.state_slots[g.owner[pending_rows]],
        pending_offsets=g.positions[pending_rows] % ratio,
    )


def _engram_sources(g: Geometry, ngram: int) -> tuple[Tensor, Tensor]:
    """Where compressed ids come from: rows 0..N-1, then S * (n - 1) history ids (latest first), then one boundary."""
    num_rows, num_history = len(g.positions), ngram - 1
    boundary = num_rows + len(g.start) * num_history

    def source(sequence: Tensor, position: Tensor) -> Tensor:
        start = g.start[sequence]
        from_history = num_rows + sequence * num_history + (start - 1 - position)
        index = torch.where(position >= start, g.row_of(sequence, position), from_history)
        return torch.where(position >= 0, index, boundary)

    back = torch.arange(ngram, device=g.positions.device)
    rows = source(g.owner.unsqueeze(1), g.positions.unsqueeze(1) - back)
    sequences = torch.arange(len(g.start), device=g.positions.device).unsqueeze(1)
    return rows, source(sequences, g.context.unsqueeze(1) - 1 - back[:-1])
