"""Which tokens the grammars of the rows allow."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np

from deepinfer.sampling.types import SampledSequence
from deepinfer.structured.matcher import EVERYTHING, fill_masks


def token_bitmask(sequences: Sequence[SampledSequence], vocab_size: int) -> np.ndarray | None:
    """int32 [R, ceil(vocab_size / 32)], bit t % 32 of word t // 32 for token t; None if no row has a constraint.

    A sequence with drafts fills the rows behind its own, too: row j of it allows what may come behind drafts[:j].
    """
    wanted = [(seq.constraint, row, seq.drafts) for row, seq in enumerate(sequences) if seq.constraint is not None]
    if not wanted:
        return None
    mask = np.full((len(sequences), (vocab_size + 31) // 32), EVERYTHING, np.int32)
    fill_masks(wanted, mask)
    return mask


def start_token_bitmask(sequences: Sequence[SampledSequence], vocab_size: int) -> Future[np.ndarray | None] | None:
    """`token_bitmask` in a thread of its own, while the model runs. Nobody touches the matchers before it is done.

    None if no row has a constraint.
    """
    if all(seq.constraint is None for seq in sequences):
        return None
    return _thread().submit(token_bitmask, sequences, vocab_size)


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "deepinfer-masks")
