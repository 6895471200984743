"""ModelInputs: all a forward step is told."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostLengths:
    """What the host knows of a prefill step, so that no shape has to be asked of the device. int64 [S] each."""

    start: np.ndarray  # tokens of a sequence that were in the cache before the step
    count: np.ndarray  # its tokens in the step
    kept: np.ndarray  # the last ones of these, that run the decoder layers


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
        logits_rows: int64 [R], rows of the flattened tokens whose logits are wanted; all in a decode step.
        keep_from: int32 [S], position from which a sequence's rows run the decoder layers (YoCo truncation, see
            models/layers/yoco.py); logits_rows lie at or after it. None: all rows run all layers.
        lengths: of a prefill step; None: they are read from the device, which costs a wait.
        drop_rows: whether the rows before keep_from leave the step (compact), or stay and are hidden (mask).
    """

    is_prefill: bool
    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    state_slots: Tensor
    logits_rows: Tensor
    keep_from: Tensor | None = None
    lengths: HostLengths | None = None
    drop_rows: bool = False
