"""Builds the inputs of a forward step (deepinfer/models/inputs.py) from a scheduled batch."""

from collections.abc import Iterable

import numpy as np
import torch

from deepinfer.engine.scheduler import ScheduledBatch
from deepinfer.engine.sequence import Sequence
from deepinfer.models.inputs import ModelInputs


def build_model_inputs(batch: ScheduledBatch, device: torch.device | str = "cpu") -> ModelInputs:
    """Inputs for one step on `device`."""
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
        token_ids = np.array([s.token_ids[-1] for s in sequences], np.int64)
        positions = starts
        logits_rows = np.arange(len(sequences))
    arrays = (
        token_ids,
        positions,
        query_start,
        (starts + counts).astype(np.int32),
        _block_tables(batch),
        np.array([s.state_slot for s in sequences], np.int32),
        logits_rows,
    )
    return ModelInputs(batch.is_prefill, *(torch.from_numpy(a).to(device, non_blocking=True) for a in arrays))


def _chunks(batch: ScheduledBatch) -> Iterable[tuple[Sequence, int]]:
    return zip(batch.sequences, batch.num_tokens, strict=True)


def _block_tables(batch: ScheduledBatch) -> np.ndarray:
    width = max(len(s.block_table) for s in batch.sequences)
    tables = np.zeros((len(batch.sequences), width), np.int32)
    for row, seq in zip(tables, batch.sequences, strict=True):
        row[: len(seq.block_table)] = seq.block_table
    return tables
