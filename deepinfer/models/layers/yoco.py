"""YoCo truncation: which rows of a prefill step run the decoder layers (spec: model, section 5, "CED / YOCO").

The decoder layers, from the last KV source on, read the compressed KV that this source wrote for every token, and their
own sliding windows. So the tokens of a prompt before `keep_from` may leave the step once that compressor has seen them:
nobody wants their logits, and decoding never reads their window entries. A kept row at position i then sees window keys
[max(keep_from, i - W + 1), i]: bounded replay, an approximation that the model was trained for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.kernels.reference.prefill_plan import expand
from deepinfer.models.inputs import HostLengths, ModelInputs
from deepinfer.models.layers.step import Rotation, StepMetadata, host_lengths, prefill_window


@dataclass(frozen=True)
class DecoderHalf:
    """What the decoder layers run on. A draft head taps these layers within one window of the end: all kept rows."""

    rows: Tensor  # int64 [M] rows of the step that go on
    step: StepMetadata  # the same step for these rows


def decoder_half(step: StepMetadata, config: ModelConfig) -> DecoderHalf:
    """The decoder layers' part of a prefill step whose inputs have `keep_from`: rows at or after it, or all (mask)."""
    inputs, lengths = step.inputs, host_lengths(step.inputs)
    assert inputs.keep_from is not None
    if inputs.drop_rows:
        start = inputs.context_lens - inputs.query_start.diff()
        num_kept = (inputs.context_lens - torch.maximum(inputs.keep_from, start)).clamp_min(0)
        sequence, offset = expand(num_kept, int(lengths.kept.sum()))
        rows = (inputs.query_start[1:] - num_kept)[sequence] + offset
    else:
        rows = torch.arange(len(inputs.positions), device=inputs.positions.device)
    narrowed = narrow_inputs(inputs, rows, lengths)
    decoder = replace(
        step,
        inputs=narrowed,
        sequence_of_row=step.sequence_of_row[rows],
        rotations={kind: Rotation(r.cos[rows], r.sin[rows]) for kind, r in step.rotations.items()},
        window=prefill_window(narrowed, config.sliding_window, step.ring_size, inputs.keep_from),
        compression={ratio: replace(plan, visible=plan.visible[rows]) for ratio, plan in step.compression.items()},
    )
    return DecoderHalf(rows, decoder)


def narrow_inputs(inputs: ModelInputs, rows: Tensor, lengths: HostLengths) -> ModelInputs:
    """The same step with only some of its rows (int64 [M], ascending; a sequence keeps its last ones, or none)."""
    return replace(
        inputs,
        token_ids=inputs.token_ids[rows],
        positions=inputs.positions[rows],
        query_start=torch.searchsorted(rows, inputs.query_start.long()).to(torch.int32),
        logits_rows=torch.searchsorted(rows, inputs.logits_rows),
        lengths=kept_lengths(lengths) if inputs.drop_rows else lengths,
    )


def kept_lengths(lengths: HostLengths) -> HostLengths:
    """Lengths of the step that only the kept rows are in."""
    return HostLengths(lengths.start + lengths.count - lengths.kept, lengths.kept, lengths.kept)
