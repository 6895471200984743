"""StepTimes: what steps with drafts take, by the decode curve and by the steps of this engine since it was measured.

A running engine is not the one that was measured: it has host work, other contexts, a machine that others use. So the
steps that end correct the curve, by batch size (powers of two): by a line over the share of the possible drafts that
they verify, through the medians of such steps by share. So what was tried tells of what was not, steps that were
disturbed of nothing, and what other shares took is not forgotten as soon as one of them is settled on.
"""

from __future__ import annotations

from collections import deque
from math import log, log2
from statistics import median

import numpy as np

BOUND = 10.0  # most that the curve is corrected by, either way
ENOUGH = 3  # steps of a share without which nothing is known of it
KEPT = 9  # latest steps of a share that count
SHARES = 8  # that are told apart
MEMORY = 1024  # steps after which nothing is known of a share any more
RIDGE = 0.02  # how much the curve's own shape counts: as variance of the share that steps verify


class StepTimes:
    """
    Args:
        step_ms: [most rows + 1] milliseconds of a decode step by its rows.
        draft_ms: [most sequences + 1] milliseconds of making drafts, by sequences.
        num_drafts: most drafts of a sequence.
    """

    def __init__(self, step_ms: np.ndarray, draft_ms: np.ndarray, num_drafts: int) -> None:
        self._step_ms = step_ms
        self._draft_ms = draft_ms
        self._num_drafts = num_drafts
        # Logarithms of how many times the expected time steps took, by batch size.
        self._steps = [DraftingSteps() for _ in range(len(step_ms).bit_length() + 1)]
        self._times: dict[tuple[int, bool], np.ndarray] = {}  # that were asked for

    def alone(self, num_sequences: int) -> float:
        """Milliseconds of a step without drafts, by the curve."""
        return float(self._step_ms[num_sequences])

    def by_drafts(self, num_sequences: int, drafting: bool) -> np.ndarray:
        """Milliseconds of a step that verifies 0, 1, ... drafts, up to all; `drafting`: and makes the next ones."""
        key = num_sequences, drafting
        if key not in self._times:
            share = np.linspace(0.0, 1.0, num_sequences * self._num_drafts + 1)
            offset, slope = self._steps[size_class(num_sequences)].line()
            factors = np.clip(np.exp(offset + slope * share), 1 / BOUND, BOUND)
            made = self._draft_ms[num_sequences] if drafting else 0.0
            self._times[key] = (self._step_ms[num_sequences:][: len(share)] + made) * factors
        return self._times[key]

    def observe(self, num_sequences: int, num_drafts: int, ms: float) -> None:
        """A step that made drafts, and verified so many, took so long."""
        expected = self._step_ms[num_sequences + num_drafts] + self._draft_ms[num_sequences]
        share = num_drafts / (num_sequences * self._num_drafts)
        self._steps[size_class(num_sequences)].add(share, log(ms / expected))

    def correct(self) -> None:
        """Let the times follow what was observed since; so far they have not."""
        self._times.clear()


class DraftingSteps:
    """Steps of one batch size that made drafts: logarithms of how many times the expected time they took."""

    def __init__(self) -> None:
        self._steps: list[deque[tuple[float, float]]] = [deque(maxlen=KEPT) for _ in range(SHARES)]  # and shares
        self._latest = [0] * SHARES  # when each of these got one
        self._number = 0

    def add(self, share: float, ratio: float) -> None:
        """A step that verified this share of the possible drafts took exp(ratio) times what was expected."""
        index = min(int(share * SHARES), SHARES - 1)
        self._number += 1
        self._steps[index].append((share, ratio))
        self._latest[index] = self._number
        for steps, latest in zip(self._steps, self._latest, strict=True):
            if self._number - latest > MEMORY:
                steps.clear()

    def line(self) -> tuple[float, float]:
        """Offset and slope over the share, through the medians of the shares of which enough is known; else zeros."""
        known = [tuple(zip(*steps, strict=True)) for steps in self._steps if len(steps) >= ENOUGH]
        if not known:
            return 0.0, 0.0
        shares = np.array([np.mean(share) for share, _ in known])
        return _fitted(shares, np.array([median(ratio) for _, ratio in known]))


def _fitted(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Offset and slope of a line through points, by ridge regression."""
    spread = x - x.mean()
    slope = float(spread @ (y - y.mean()) / (spread @ spread + RIDGE))
    return float(y.mean() - slope * x.mean()), slope


def size_class(num_sequences: int) -> int:
    """The power of two, as its exponent, that stands for this batch size."""
    return round(log2(num_sequences))
