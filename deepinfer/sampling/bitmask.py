"""Which tokens the grammars of the rows allow."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from typing import Protocol

import numpy as np

from deepinfer.sampling.types import SampledSequence
from deepinfer.structured.matcher import EVERYTHING, Matcher, fill_masks

Wanted = Sequence[tuple[Matcher, int, Sequence[int]]]  # (matcher, its first row, drafts)


class Constrained(Protocol):
    """What a sequence says of its grammar and its drafts before the step's tokens are read."""

    constraint: Matcher | None
    next_drafts: list[int]


def token_bitmask(sequences: Sequence[SampledSequence], vocab_size: int) -> np.ndarray | None:
    """int32 [R, ceil(vocab_size / 32)], bit t % 32 of word t // 32 for token t; None if no row has a constraint.

    A sequence with drafts fills the rows behind its own, too: row j of it allows what may come behind drafts[:j].
    """
    wanted = [(seq.constraint, row, seq.drafts) for row, seq in enumerate(sequences) if seq.constraint is not None]
    return _filled(wanted, len(sequences), vocab_size) if wanted else None


def start_token_bitmask(
    sequences: Sequence[Constrained], num_rows: Sequence[int], vocab_size: int
) -> Future[np.ndarray] | None:
    """`token_bitmask` in a thread of its own, while the model runs. Nobody touches the matchers before it is done.

    num_rows: of each sequence, 1 and its drafts.
    """
    firsts = accumulate(num_rows, initial=0)
    wanted = [
        (seq.constraint, first, seq.next_drafts[: count - 1])
        for seq, count, first in zip(sequences, num_rows, firsts, strict=False)
        if seq.constraint is not None
    ]
    return _thread().submit(_filled, wanted, sum(num_rows), vocab_size) if wanted else None


def _filled(wanted: Wanted, num_rows: int, vocab_size: int) -> np.ndarray:
    mask = np.full((num_rows, (vocab_size + 31) // 32), EVERYTHING, np.int32)
    fill_masks(wanted, mask)
    return mask


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "deepinfer-masks")
