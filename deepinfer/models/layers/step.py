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
from deepinfer.models.caches import carry_size, history_size
from deepinfer.models.inputs import HostLengths, ModelInputs

POOLED_RATIO = 2  # the one compress ratio beside 1 that a config may have


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
    pending_places: Tensor  # int64 [pending] position % size of the carry


@dataclass(frozen=True)
class HistoryPlan:
    """Which compressed ids stay in the Engram history, and where."""

    rows: Tensor | None  # int64 [kept] new rows; None: all
    slots: Tensor  # int64 [kept] state slots
    places: Tensor  # int64 [kept] position % size of the history


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
    history: HistoryPlan
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
        lengths = host_lengths(inputs)
        start, context = lengths.start, lengths.start + lengths.count
        complete = context // POOLED_RATIO
        num_history = history_size(config.engram_max_ngram_size, ring_size - config.sliding_window)
        parts = ops.prefill_plan(
            inputs.positions,
            inputs.query_start,
            inputs.context_lens,
            inputs.state_slots,
            inputs.block_tables,
            torch.stack((frequencies[False], frequencies[True])),
            POOLED_RATIO,
            block_size,
            max(config.engram_max_ngram_size, 2),
            carry_size(POOLED_RATIO, ring_size - config.sliding_window),
            num_history,
            wide,
            int((complete - start // POOLED_RATIO).sum()),
            int((context - np.maximum(start, complete * POOLED_RATIO)).sum()),
            int(np.minimum(lengths.count, num_history).sum()),
        )
        owner, state_slots, rotations, at_group, visible, single_slots, members, group_slots, pending, sources, kept = (
            parts
        )
        plain, compressed = (Rotation(*rotations[:, kind]) for kind in range(2))
        rows = sources[:, :1]  # an n-gram starts with the row itself
        single = CompressionPlan(visible[0], rows, single_slots, compressed, *pending[:, :0])
        pooled = CompressionPlan(visible[1], members, group_slots, Rotation(*at_group), *pending)
        return cls(
            inputs=inputs,
            sequence_of_row=owner,
            state_slots=state_slots,
            rotations={False: plain, True: compressed},
            window=prefill_window(inputs, config.sliding_window, ring_size),
            compression={1: single, POOLED_RATIO: pooled},
            ngram_source=sources,
            history=HistoryPlan(*kept),
            block_size=block_size,
            ring_size=ring_size,
        )

    def cache_slots(self, positions: Tensor, entries: int) -> Tensor:
        """Physical slots of compressed positions int32 [N, K] (-1 kept) in a cache of `entries` a block."""
        return ops.entry_slots(positions, self.inputs.block_tables, self.sequence_of_row, entries)


def prefill_window(inputs: ModelInputs, window: int, ring: int, keep_from: Tensor | None = None) -> WindowPlan:
    """Window of `window` tokens of a prefill step, kept in rings of `ring` slots (at least `window`).

    keep_from: int32 [S], rows at or after it see nothing before it; None: they see everything.
    """
    lengths = host_lengths(inputs)
    return WindowPlan(
        False,
        *ops.window_plan(
            inputs.positions,
            inputs.query_start,
            inputs.context_lens,
            inputs.state_slots,
            keep_from,
            window,
            ring,
            int(np.minimum(lengths.start, window - 1).sum()),
            int(np.minimum(lengths.count, ring).sum()),
        ),
    )


def host_lengths(inputs: ModelInputs) -> HostLengths:
    """The lengths of a prefill step; read from the device, which costs a wait, if the host was not told them."""
    if inputs.lengths is not None:
        return inputs.lengths
    counts = inputs.query_start.diff()
    start = inputs.context_lens - counts
    keep_from = start if inputs.keep_from is None else inputs.keep_from
    kept = (inputs.context_lens - torch.maximum(keep_from, start)).clamp_min(0)
    return HostLengths(*torch.stack((start, counts, kept)).long().cpu().numpy())
