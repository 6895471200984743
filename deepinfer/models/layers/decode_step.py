"""StepMetadata of a decode step: one or several rows a sequence, and nothing whose shape depends on values.

Every row has its own position, state slot and block table, so the plan and the kernels need not know how many rows a
sequence has: rows of one sequence are stored before any is read, and each sees what lies at or before its position.
That is how drafts are verified. What a rejected one wrote lies behind the last position, and is overwritten.

Every shape follows from the number of rows and the width of the block table; nothing is read back from the device and
nothing is compacted, so the step can be captured in a CUDA graph. What a row has no use for goes to the null block or
the null slot instead. A padding row (state slot 0, block table of zeros, position 0, context_len 1) writes only there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.kernels import ops
from deepinfer.models.caches import carry_size, history_size
from deepinfer.models.inputs import ModelInputs
from deepinfer.models.layers.step import (
    POOLED_RATIO,
    CompressionPlan,
    HistoryPlan,
    Rotation,
    StepMetadata,
    WindowPlan,
)


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
    rotations, window_slots, ngram_source, members, slots, visible = ops.decode_plan(
        inputs.positions,
        inputs.state_slots,
        inputs.block_tables,
        torch.stack((frequencies[False], frequencies[True])),
        POOLED_RATIO,
        block_size,
        config.sliding_window,
        ring_size,
        max(config.engram_max_ngram_size, 2),
        carry_size(POOLED_RATIO, ring_size - config.sliding_window),
        history_size(config.engram_max_ngram_size, ring_size - config.sliding_window),
        wide,
    )
    state_slots, stored_slots, single_slots, pooled_slots, pending_slots, carry_places, history_places = slots
    plain, compressed, at_group = (Rotation(cos, sin) for cos, sin in zip(*rotations, strict=True))
    rows, none = members[:, -1], members[:0, 0]  # a group's last member is the row itself
    single = CompressionPlan(visible[0], members[:, -1:], single_slots, compressed, none, none, none)
    pooled = CompressionPlan(visible[1], members, pooled_slots, at_group, rows, pending_slots, carry_places)
    return StepMetadata(
        inputs=inputs,
        sequence_of_row=inputs.query_start[:-1],  # 0, 1, 2, ...: which entry of the inputs a row has
        state_slots=state_slots,
        rotations={False: plain, True: compressed},
        window=WindowPlan(True, window_slots, None, None, stored_slots),
        compression={1: single, POOLED_RATIO: pooled},
        ngram_source=ngram_source,
        history=HistoryPlan(None, state_slots, history_places),
        block_size=block_size,
        ring_size=ring_size,
    )
