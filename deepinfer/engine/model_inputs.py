"""Builds the inputs of a forward step (deepinfer/models/inputs.py) from a scheduled batch."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.block_manager import NULL_BLOCK
from deepinfer.engine.cuda_graph import DecodeGraphs
from deepinfer.engine.scheduler import ScheduledBatch
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.state_slots import NULL_SLOT
from deepinfer.engine.step_buffers import StepShape, first_rows, upload
from deepinfer.models.inputs import HostLengths, ModelInputs

PENDING = -1  # stands for a token that the host does not know yet


def build_model_inputs(
    batch: ScheduledBatch, config: EngineConfig, latest_tokens: Tensor, graphs: DecodeGraphs | None = None
) -> ModelInputs:
    """Inputs for one step, on config.device, brought there by one copy.

    Args:
        latest_tokens: int64 [slots], there: the token sampled last for each state slot, for those not read yet.
        graphs: a decode step is written to where these read it, padded.
    """
    return _prefill_inputs(batch, config) if batch.is_prefill else _decode_inputs(batch, config, latest_tokens, graphs)


def _prefill_inputs(batch: ScheduledBatch, config: EngineConfig) -> ModelInputs:
    sequences = batch.sequences
    starts = np.array([s.num_computed for s in sequences], np.int64)
    counts = np.array(batch.num_tokens, np.int64)
    query_start = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    completes = np.array([s.num_computed + n == len(s) for s, n in _chunks(batch)])
    keep_from = decoder_start(batch, config)
    arrays: list[np.ndarray] = [
        np.concatenate([np.array(s.token_ids[s.num_computed : s.num_computed + n]) for s, n in _chunks(batch)]),
        np.concatenate([np.arange(s.num_computed, s.num_computed + n) for s, n in _chunks(batch)]),
        query_start,
        (starts + counts).astype(np.int32),
        _block_tables(batch),
        np.array([s.state_slot for s in sequences], np.int32),
        query_start[1:][completes].astype(np.int64) - 1,
        *([] if keep_from is None else [keep_from]),
    ]
    tensors = upload(arrays, torch.device(config.device))
    kept = counts if keep_from is None else np.clip(starts + counts - keep_from, 0, counts)
    lengths = HostLengths(starts, counts, kept)
    return ModelInputs(
        is_prefill=True,
        token_ids=tensors[0],
        positions=tensors[1],
        query_start=tensors[2],
        context_lens=tensors[3],
        block_tables=tensors[4],
        state_slots=tensors[5],
        logits_rows=tensors[6],
        keep_from=None if keep_from is None else tensors[7],
        lengths=lengths,
        drop_rows=config.yoco_prefill_truncation_mode == "compact",
    )


def _decode_inputs(
    batch: ScheduledBatch, config: EngineConfig, latest_tokens: Tensor, graphs: DecodeGraphs | None
) -> ModelInputs:
    sequences, num_rows = batch.sequences, len(batch.sequences)
    num_blocks = max(len(s.block_table) for s in sequences)
    shape = StepShape(num_rows, num_blocks) if graphs is None else graphs.shape_of(num_rows, num_blocks)
    token_ids, positions = np.zeros(shape.rows, np.int64), np.zeros(shape.rows, np.int64)
    token_ids[:num_rows] = [PENDING if s.num_pending else s.token_ids[-1] for s in sequences]
    positions[:num_rows] = [s.num_computed for s in sequences]
    state_slots = np.full(shape.rows, NULL_SLOT, np.int32)
    state_slots[:num_rows] = [s.state_slot for s in sequences]
    # A row of padding is a sequence of one token in the null block and the null slot.
    arrays: list[np.ndarray] = [
        token_ids,
        positions,
        (positions + 1).astype(np.int32),
        state_slots,
        _block_tables(batch, shape),
    ]
    device = torch.device(config.device)
    if graphs is None:
        arrays += [np.arange(num_rows + 1, dtype=np.int32), np.arange(num_rows)]
        *parts, query_start, logits_rows = upload(arrays, device)
        inputs = ModelInputs(False, parts[0], parts[1], query_start, parts[2], parts[4], parts[3], logits_rows)
    else:
        graphs.buffers.write(arrays)
        inputs = first_rows(graphs.inputs[shape], num_rows)
    if PENDING in token_ids:
        latest = latest_tokens[inputs.state_slots.long()]
        inputs.token_ids.copy_(torch.where(inputs.token_ids < 0, latest, inputs.token_ids))
    return inputs


def decoder_start(batch: ScheduledBatch, config: EngineConfig) -> np.ndarray | None:
    """First position of each sequence that runs the decoder layers, int32 [S]; None when every token of all does.

    Counted from the end of the prompt, not of the sequence: recomputing a preempted sequence gives the same again.
    """
    keep_tokens = config.yoco_prefill_keep_tokens
    if not batch.is_prefill or config.yoco_prefill_truncation_mode == "off" or keep_tokens is None:
        return None
    keep_from = np.array([max(s.num_prompt_tokens - keep_tokens, 0) for s in batch.sequences], np.int32)
    return keep_from if keep_from.any() else None


def _chunks(batch: ScheduledBatch) -> Iterable[tuple[Sequence, int]]:
    return zip(batch.sequences, batch.num_tokens, strict=True)


def _block_tables(batch: ScheduledBatch, shape: StepShape | None = None) -> np.ndarray:
    """int32 [S, longest table], or of `shape`, padded with the null block.

    Without a copy a sequence, which would cost most of it.
    """
    tables = [s.block_table for s in batch.sequences]
    lengths = np.array([len(table) for table in tables])
    size = (len(tables), lengths.max()) if shape is None else (shape.rows, shape.blocks)
    padded = np.full(size, NULL_BLOCK, np.int32)
    padded[: len(tables)][np.arange(size[1]) < lengths[:, None]] = np.frombuffer(b"".join(tables), np.int32)
    return padded
