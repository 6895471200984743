"""How long cache blocks keep their content, from a sample of them: vLLM's kv_block_* histograms.

A block that is given out anew loses the content that it had: its lifetime ends, and it has been idle since its last
user freed it. In between, a prefix cache may take it into use again, after a gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from deepinfer.observability.histograms import TotalsHistogram

EVERY = 64  # one block of so many is watched; blocks are given out in turn, so all are alike
_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800)

LIFETIME = TotalsHistogram("block_lifetime", _SECONDS)
IDLE = TotalsHistogram("block_idle", _SECONDS)
REUSE_GAP = TotalsHistogram("block_reuse_gap", _SECONDS)


class BlockLifetimes:
    """Counts into `totals`. Call its methods for every block: those that are not watched cost next to nothing.

    Args:
        totals: of the engine's statistics.
        clock: seconds, monotonic.
    """

    def __init__(self, totals: dict[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._totals = totals
        self._clock = clock
        self._filled: dict[int, float] = {}  # when a watched block was given out
        self._used: dict[int, float] = {}  # when it was taken or freed for the last time

    def allocated(self, block: int) -> None:
        """The block gets new content."""
        if block % EVERY != 1:
            return
        now = self._clock()
        if block in self._filled:
            LIFETIME.observe(self._totals, now - self._filled[block])
            IDLE.observe(self._totals, now - self._used[block])
        self._filled[block] = self._used[block] = now

    def shared(self, block: int) -> None:
        """Somebody else uses its content, too, or again."""
        if block % EVERY == 1 and block in self._used:
            now = self._clock()
            REUSE_GAP.observe(self._totals, now - self._used[block])
            self._used[block] = now

    def freed(self, block: int) -> None:
        """Nobody uses its content any more."""
        if block % EVERY == 1:
            self._used[block] = self._clock()
