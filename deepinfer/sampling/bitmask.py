"""Which tokens the grammars of the rows allow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer.sampling.types import SampledSequence
from deepinfer.structured.matcher import EVERYTHING, fill_next


def token_bitmask(sequences: Sequence[SampledSequence], vocab_size: int) -> np.ndarray | None:
    """int32 [R, ceil(vocab_size / 32)], bit t % 32 of word t // 32 for token t; None if no row has a constraint.

    A sequence with drafts fills the rows behind its own, too: row j of it allows what may come behind drafts[:j].
    """
    constrained = [(row, seq.constraint) for row, seq in enumerate(sequences) if seq.constraint is not None]
    if not constrained:
        return None
    mask = np.full((len(sequences), (vocab_size + 31) // 32), EVERYTHING, np.int32)
    plain = []
    for row, constraint in constrained:
        drafts = sequences[row].drafts
        if drafts:
            constraint.fill_masks(drafts, mask[row : row + 1 + len(drafts)])
        else:
            plain.append((constraint, row))
    fill_next(plain, mask)
    return mask
