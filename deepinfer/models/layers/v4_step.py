"""Step metadata of DeepSeek-V4: overlapping and very long groups, each layer with its own compressor.

The carry of a compressor is a ring of the last `span` tokens' inputs, a token at position % span, so nothing has to be
reset between sequences: what a group reads was written by its own sequence or is masked out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.config.model_v4 import AttentionKind, LayerPlanV4, ModelConfigV4
from deepinfer.kernels import ops
from deepinfer.kernels.reference.prefill_plan import Geometry, expand
from deepinfer.models.inputs import ModelInputs
from deepinfer.models.layers.step import Rotation, WindowPlan, host_lengths, prefill_window


@dataclass(frozen=True)
class GroupPlan:
    """Groups that this step completes, for the layers of one kind; in a decode step one candidate a row.

    As in step.py, no shape of a decode step depends on values: a group that stays open goes to the null block.
    """

    visible: Tensor  # int32 [N] groups that each row may see
    members: Tensor  # int64 [groups, span] into [N new rows | nothing | S * span carried], the pooled tokens
    series: Tensor  # int64 [span] which series of the token a member contributes
    state_slots: Tensor  # int64 [S]
    group_slots: Tensor  # int64 [groups] where the entry goes in the paged cache
    rotation: Rotation  # at the first token of each group
    kept_rows: Tensor  # int64 [kept] new rows that stay in the carry
    kept_slots: Tensor  # int64 [kept]
    kept_offsets: Tensor  # int64 [kept]
    visible_slots: Tensor | None  # int32 [N, at least max(visible)] slots of visible groups, -1 = unused (HEAVY only)


@dataclass(frozen=True)
class StepMetadataV4:
    """Built once a step by `StepMetadataV4.build`."""

    inputs: ModelInputs
    sequence_of_row: Tensor  # int32 [N]
    rotations: dict[bool, Rotation]  # compressed layer? -> at each row's position
    window: WindowPlan
    groups: dict[AttentionKind, GroupPlan]

    @classmethod
    def build(
        cls,
        inputs: ModelInputs,
        config: ModelConfigV4,
        frequencies: dict[bool, Tensor],
        block_size: int,
        wide: torch.dtype,
    ) -> StepMetadataV4:
        """`frequencies` by "is the layer compressed" (rope_frequencies), on the device; `wide` is at least float32."""
        geometry = Geometry.of(inputs.positions, inputs.query_start, inputs.context_lens, inputs.state_slots)
        make_window = prefill_window if inputs.is_prefill else _decode_window
        groups = {
            plan.kind: _group_plan(geometry, plan, block_size, inputs, frequencies[True], wide)
            for plan in {plan.kind: plan for plan in config.layers if plan.compress_ratio}.values()
        }
        return cls(
            inputs,
            geometry.owner.to(torch.int32),
            {kind: Rotation.at(inputs.positions, f, wide) for kind, f in frequencies.items()},
            make_window(inputs, config.sliding_window, config.sliding_window),
            groups,
        )


def _decode_window(inputs: ModelInputs, window: int, ring: int) -> WindowPlan:
    """One row a sequence: stored first, then the window is read from the ring."""
    wanted = inputs.positions.unsqueeze(1) + torch.arange(1 - window, 1, device=inputs.positions.device)  # [N, W]
    ring_slots = (inputs.state_slots.long() * ring).unsqueeze(1) + wanted % ring
    return WindowPlan(True, torch.where(wanted >= 0, ring_slots, -1).to(torch.int32), None, None, ring_slots[:, -1])


def _group_plan(
    g: Geometry, plan: LayerPlanV4, block_size: int, inputs: ModelInputs, frequencies: Tensor, dtype: torch.dtype
) -> GroupPlan:
    ratio, span = plan.compress_ratio, plan.group_span
    num_rows, entries = len(g.positions), block_size // ratio
    if inputs.is_prefill:
        first_group = g.start // ratio
        lengths = host_lengths(inputs)
        start, context = lengths.start, lengths.start + lengths.count
        sequence, offset = expand(g.context // ratio - first_group, int((context // ratio - start // ratio).sum()))
        group = first_group[sequence] + offset
        is_complete = torch.ones_like(group, dtype=torch.bool)
        kept_rows = g.last_rows((g.context - g.start).clamp_max(span), int(np.minimum(lengths.count, span).sum()))
        most_visible = int(context.max()) // ratio
    else:
        sequence, group = g.owner, g.positions // ratio
        is_complete = g.positions % ratio == ratio - 1
        kept_rows = g.owner
        most_visible = inputs.block_tables.shape[1] * entries
    member = torch.arange(span, device=group.device)
    position = group.unsqueeze(1) * ratio + member - (span - ratio)  # [groups, span]
    column = sequence.unsqueeze(1)
    nothing = num_rows  # before the first token, or behind the last one
    carried = num_rows + 1 + column * span + position % span
    members = torch.where(position >= g.start[column], g.row_of(column, position), carried)
    members = torch.where((position >= 0) & (position < g.context[column]), members, nothing)
    group_slots = inputs.block_tables[sequence, group // entries].long() * entries + group % entries
    visible = (g.positions + 1) // ratio
    visible_slots = None
    if plan.kind is AttentionKind.HEAVY:
        every = torch.arange(most_visible, device=group.device)
        every = torch.where(every < visible.unsqueeze(1), every, -1)
        visible_slots = ops.entry_slots(every, inputs.block_tables, g.owner, entries)
    return GroupPlan(
        visible=visible.to(torch.int32),
        members=members,
        series=member // ratio,
        state_slots=g.state_slots,
        group_slots=torch.where(is_complete, group_slots, 0),
        rotation=Rotation.at(group * ratio, frequencies, dtype),
        kept_rows=kept_rows,
        kept_slots=g.state_slots[g.owner[kept_rows]],
        kept_offsets=g.positions[kept_rows] % span,
        visible_slots=visible_slots,
    )
