"""ModelInputs: all a forward step is told, and how to build it from a scheduled batch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.engine.scheduler import ScheduledBatch


@dataclass(slots=True)
class ModelInputs:
    """S sequences with N query tokens, flattened in sequence order; R rows want logits.

    Attributes:
        is_prefill: False means exactly one token a sequence.
        token_ids: int64 [N].
        positions: int64 [N], position of each token in its sequence.
        query_start: int32 [S + 1], prefix sums of the tokens a sequence contributes.
        context_lens: int32 [S], tokens in the cache after this step.
        block_tables: int32 [S, max_blocks], padded with the null block 0.
        state_slots: int32 [S].
        logits_rows: int64 [R], rows of the flattened tokens whose logits are wanted.
    """

    is_prefill: bool
    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    state_slots: Tensor
    logits_rows: Tensor

    def slot_mapping(self, block_size: int) -> Tensor:
        """int64 [N]: physical token slot of every query token, block * block_size + offset."""
        lengths = (self.query_start[1:] - self.query_start[:-1]).long()
        rows = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        blocks = self.block_tables[rows, self.positions // block_size].long()
        return blocks * block_size + self.positions % block_size


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


def _chunks(batch: ScheduledBatch):
    return zip(batch.sequences, batch.num_tokens, strict=True)


def _block_tables(batch: ScheduledBatch) -> np.ndarray:
    width = max(len(s.block_table) for s in batch.sequences)
    tables = np.zeros((len(batch.sequences), width), np.int32)
    for row, seq in zip(tables, batch.sequences, strict=True):
        row[: len(seq.block_table)] = seq.block_table
    return tables
