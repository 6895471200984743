"""Builds the inputs of a forward step (deepinfer/models/inputs.py) from a scheduled batch."""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.block_manager import NULL_BLOCK
from deepinfer.engine.scheduler import ScheduledBatch
from deepinfer.engine.sequence import Sequence
from deepinfer.models.inputs import ModelInputs

PENDING = -1  # stands for a token that the host does not know yet


def build_model_inputs(batch: ScheduledBatch, config: EngineConfig, latest_tokens: Tensor) -> ModelInputs:
    """Inputs for one step, on config.device.

    latest_tokens int64 [slots], there: the token sampled last for each state slot, for those that are not read yet.
    """
    sequences = batch.sequences
    starts = np.array([s.num_computed for s in sequences], np.int64)
    counts = np.array(batch.num_tokens, np.int64)
    query_start = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    if batch.is_prefill:
        token_ids = np.concatenate(
            [np.array(s.token_ids[s.num_computed : s.num_computed + n]) for s, n in _chunks(batch)]
        )
        positions = np.concatenate([np.arange(s.num_computed, s.num_computed + n) for s, n in _chunks(batch)])
        completes = np.array([s.num_computed + n == len(s) for s, n in _chunks(batch)])
        logits_rows = query_start[1:][completes].astype(np.int64) - 1
    else:
        token_ids = np.array([PENDING if s.num_pending else s.token_ids[-1] for s in sequences], np.int64)
        positions = starts
        logits_rows = np.arange(len(sequences))
    keep_from = decoder_start(batch, config)
    on_device = partial(to_device, device=config.device)
    state_slots = on_device(np.array([s.state_slot for s in sequences], np.int32))
    device_token_ids = on_device(token_ids)
    if not batch.is_prefill and PENDING in token_ids:
        device_token_ids = torch.where(device_token_ids < 0, latest_tokens[state_slots.long()], device_token_ids)
    return ModelInputs(
        is_prefill=batch.is_prefill,
        token_ids=device_token_ids,
        positions=on_device(positions),
        query_start=on_device(query_start),
        context_lens=on_device((starts + counts).astype(np.int32)),
        block_tables=on_device(_block_tables(batch)),
        state_slots=state_slots,
        logits_rows=on_device(logits_rows),
        keep_from=None if keep_from is None else on_device(keep_from),
        drop_rows=config.yoco_prefill_truncation_mode == "compact",
    )


def to_device(array: np.ndarray, device: str) -> Tensor:
    """A copy there that the host does not wait for."""
    return torch.from_numpy(array).to(device, non_blocking=True)


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


def _block_tables(batch: ScheduledBatch) -> np.ndarray:
    """int32 [S, longest table], padded with the null block; without a copy a sequence, which would cost most of it."""
    tables = [s.block_table for s in batch.sequences]
    lengths = np.array([len(table) for table in tables])
    padded = np.full((len(tables), lengths.max()), NULL_BLOCK, np.int32)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.frombuffer(b"".join(tables), np.int32)
    return padded
