"""Engram's compressed token map and hash multipliers (spec: model, section 4)."""

from __future__ import annotations

from functools import cache

import numpy as np


@cache
def engram_multipliers(layer_id: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """Four odd int64 multipliers of a layer's hash."""
    bound = (2**63 - 1) // compressed_vocab_size // 2
    draws = np.random.default_rng(10007 * layer_id).integers(0, bound, size=4, dtype=np.int64)
    return tuple(int(v) * 2 + 1 for v in draws)
