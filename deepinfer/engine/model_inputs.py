"""Builds the inputs of a forward step (deepinfer/models/inputs.py) from a scheduled batch."""

from collections.abc import Iterable

import numpy as np
import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.cuda_graph import DecodeGraphs
from deepinfer.engine.prompt_logprobs import logits_rows
from deepinfer.engine.scheduler import ScheduledBatch
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.sequence_metadata import SequenceMetadataPool
from deepinfer.engine.state_slots import NULL_SLOT
from deepinfer.engine.step_buffers import upload
from deepinfer.models.inputs import HostLengths, ModelInputs
from deepinfer.speculation.slot_tokens import SlotTokens

PENDING = -1  # stands for a token that the host does not know yet; -1 - j for the draft j behind it


def build_model_inputs(
    batch: ScheduledBatch,
    slots: np.ndarray,
    metadata: SequenceMetadataPool,
    config: EngineConfig,
    slot_tokens: SlotTokens,
    graphs: DecodeGraphs | None = None,
) -> ModelInputs:
    """Inputs for one step, on config.device, brought there by one copy.

    Args:
        slots: int64 [S], state slots of the batch, taken from `metadata` for this step.
        slot_tokens: tokens of each state slot that the host has not read yet.
        graphs: a decode step is written to where these read it, padded.
    """
    if batch.is_prefill:
        return _prefill_inputs(batch, slots, metadata, config)
    rows = slots if slot_tokens.num_drafts == 0 else np.repeat(slots, batch.num_tokens)
    only_device_knows = batch.has_drafts or (slot_tokens.num_drafts and any(s.num_pending for s in batch.sequences))
    write = _write_rows if only_device_knows else _write_decode_step
    num_rows, num_blocks = len(rows), metadata.longest_table(slots)
    if graphs is not None:
        shape = graphs.shape_of(num_rows, num_blocks)
        *arrays, block_tables = graphs.buffers.host_arrays(shape)
        write(batch, rows, *arrays)
        metadata.write_block_tables(rows, block_tables)
        graphs.buffers.upload(shape)
        return graphs.rows(shape, num_rows)
    arrays = [np.empty(num_rows, dtype) for dtype in (np.int64, np.int64, np.int32, np.int32)]
    write(batch, rows, *arrays)
    block_tables = np.empty((num_rows, num_blocks), np.int32)
    metadata.write_block_tables(rows, block_tables)
    token_ids, positions, context_lens, state_slots, tables, query_start, logits_rows = upload(
        [*arrays, block_tables, np.arange(num_rows + 1, dtype=np.int32), np.arange(num_rows)],
        torch.device(config.device),
    )
    inputs = ModelInputs(False, token_ids, positions, query_start, context_lens, tables, state_slots, logits_rows)
    return slot_tokens.fill(inputs) if PENDING in arrays[0] else inputs


def _prefill_inputs(
    batch: ScheduledBatch, slots: np.ndarray, metadata: SequenceMetadataPool, config: EngineConfig
) -> ModelInputs:
    sequences = batch.sequences
    starts = np.array([s.num_computed for s in sequences], np.int64)
    counts = np.array(batch.num_tokens, np.int64)
    query_start = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    keep_from = decoder_start(batch, config)
    block_tables = np.empty((len(sequences), metadata.longest_table(slots)), np.int32)
    metadata.write_block_tables(slots, block_tables)
    arrays: list[np.ndarray] = [
        np.concatenate([np.array(s.token_ids[s.num_computed : s.num_computed + n]) for s, n in _chunks(batch)]),
        np.concatenate([np.arange(s.num_computed, s.num_computed + n) for s, n in _chunks(batch)]),
        query_start,
        (starts + counts).astype(np.int32),
        block_tables,
        slots.astype(np.int32),
        logits_rows(batch),
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


def _write_decode_step(
    batch: ScheduledBatch,
    slots: np.ndarray,
    token_ids: np.ndarray,
    positions: np.ndarray,
    context_lens: np.ndarray,
    state_slots: np.ndarray,
) -> None:
    """Fill the arrays, which may have more rows: those are padding, one token in the null block and the null slot."""
    sequences, num_rows = batch.sequences, len(slots)
    token_ids[:num_rows] = [PENDING if s.num_pending else s.token_ids[-1] for s in sequences]
    positions[:num_rows] = [s.num_computed for s in sequences]
    state_slots[:num_rows] = slots
    token_ids[num_rows:] = positions[num_rows:] = 0
    state_slots[num_rows:] = NULL_SLOT
    np.add(positions, 1, out=context_lens, casting="same_kind")


def _write_rows(
    batch: ScheduledBatch,
    slots: np.ndarray,
    token_ids: np.ndarray,
    positions: np.ndarray,
    context_lens: np.ndarray,
    state_slots: np.ndarray,
) -> None:
    """The same with drafts: a row for each token; which ones and where they are, the device knows."""
    counts, num_rows = np.array(batch.num_tokens), len(slots)
    token_ids[:num_rows] = PENDING - (np.arange(num_rows) - np.repeat(np.cumsum(counts) - counts, counts))
    state_slots[:num_rows] = slots
    token_ids[num_rows:] = 0
    state_slots[num_rows:] = NULL_SLOT
    positions.fill(0)
    context_lens.fill(1)


def decoder_start(batch: ScheduledBatch, config: EngineConfig) -> np.ndarray | None:
    """First position of each sequence that runs the decoder layers, int32 [S]; None when every token of all does.

    Counted from the end of the prompt, not of the sequence: recomputing a preempted sequence gives the same again.
    A request that asks how likely the tokens of its prompt were has all of them run.
    """
    keep_tokens = config.yoco_prefill_keep_tokens
    if not batch.is_prefill or config.yoco_prefill_truncation_mode == "off" or keep_tokens is None:
        return None
    keep_from = np.array(
        [max(s.num_prompt_tokens - keep_tokens, 0) * (s.params.prompt_logprobs is None) for s in batch.sequences],
        np.int32,
    )
    return keep_from if keep_from.any() else None


def _chunks(batch: ScheduledBatch) -> Iterable[tuple[Sequence, int]]:
    return zip(batch.sequences, batch.num_tokens, strict=True)
