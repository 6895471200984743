"""StepTimes: what decode steps take, by the decode curve and by the steps of this engine since it was measured.

A running engine is not the one that was measured: it has host work, other contexts, a machine that others use. So every
decode step that ends corrects the curve at about its number of rows, for steps that make drafts and for those that do
not. A correction is the median of the latest few, so that a step that was disturbed counts for nothing, and bounded.
"""

from __future__ import annotations

from collections import deque
from math import log2
from statistics import median

import numpy as np

BOUND = 10.0  # most that the curve is corrected by, either way
KEPT = 9  # steps whose median counts
ENOUGH = 3  # steps without which nothing is known


class StepTimes:
    """
    Args:
        step_ms: [most rows + 1] milliseconds of a decode step by its rows.
        draft_ms: [most sequences + 1] milliseconds of making drafts, by sequences.
    """

    def __init__(self, step_ms: np.ndarray, draft_ms: np.ndarray) -> None:
        self._step_ms = step_ms
        self._draft_ms = draft_ms
        self._log_rows = np.log2(np.maximum(np.arange(len(step_ms)), 1))
        num_classes = len(step_ms).bit_length() + 1
        # By whether drafts are made, then by the power of two that the rows are nearest to.
        self._ratios: tuple[list[deque[float]], ...] = tuple(
            [deque(maxlen=KEPT) for _ in range(num_classes)] for _ in range(2)
        )
        self._corrections = [np.ones(len(step_ms)), np.ones(len(step_ms))]

    def plain(self, num_sequences: int) -> float:
        """Milliseconds of a step without drafts."""
        return float(self.by_drafts(num_sequences, 0, False)[0])

    def by_drafts(self, num_sequences: int, most: int, drafting: bool) -> np.ndarray:
        """Milliseconds [most + 1] of a step that verifies 0, 1, ... drafts; `drafting`: and makes the next ones."""
        rows = slice(num_sequences, num_sequences + most + 1)
        made = self._draft_ms[num_sequences] if drafting else 0.0
        return (self._step_ms[rows] + made) * self._corrections[drafting][rows]

    def knows_plain(self, num_sequences: int) -> bool:
        """Whether steps of about so many sequences have run without drafts."""
        return len(self._ratios[False][_size_class(num_sequences)]) >= ENOUGH

    def observe(self, num_sequences: int, num_rows: int, drafting: bool, ms: float) -> None:
        """A step took so long. One that verifies drafts and makes none is neither kind, and tells nothing."""
        if ms <= 0 or not (drafting or num_rows == num_sequences):
            return
        expected = self._step_ms[num_rows] + (self._draft_ms[num_sequences] if drafting else 0.0)
        self._ratios[drafting][_size_class(num_rows)].append(float(ms / expected))

    def fade(self) -> None:
        """Drafts have not been verified for long: what is known of such steps slowly counts less than the curve."""
        for ratios in self._ratios[True]:
            if ratios:
                ratios.popleft()

    def correct(self) -> None:
        """Let the times follow what was observed; so far they have not."""
        known = [
            {size: min(max(median(r), 1 / BOUND), BOUND) for size, r in enumerate(kind) if len(r) >= ENOUGH}
            for kind in self._ratios
        ]
        for drafting in (False, True):
            points = known[drafting] or known[not drafting]  # the machine is the same
            if points:
                self._corrections[drafting] = np.interp(self._log_rows, list(points), list(points.values()))


def _size_class(num_rows: int) -> int:
    return round(log2(num_rows))
