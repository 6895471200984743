"""StepTimes: what decode steps take, by the decode curve and by the steps of this engine since it was measured.

A running engine is not the one that was measured: it has host work, other contexts, a machine that others use. So the
steps that end correct the curve, by batch size (powers of two). Steps without drafts: by the median of the latest few.
Steps that make drafts: by a line over the share of the possible drafts that they verify, through the medians of such
steps by share. So what was tried tells of what was not, steps that were disturbed of nothing, and what other shares
took is not forgotten as soon as one of them is settled on.
"""

from __future__ import annotations

from collections import deque
from math import log, log2
from statistics import median

import numpy as np

BOUND = 10.0  # most that the curve is corrected by, either way
ENOUGH = 3  # steps without which nothing is known
KEPT = 9  # latest steps that count, of a kind and a share
SHARES = 8  # that are told apart
MEMORY = 1024  # steps with drafts after which nothing is known of a share any more
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
        num_classes = len(step_ms).bit_length() + 1
        # Logarithms of how many times the expected time steps took, by batch size; with drafts, behind their share.
        self._plain: list[deque[float]] = [deque(maxlen=KEPT) for _ in range(num_classes)]
        self._drafting = [DraftingSteps() for _ in range(num_classes)]
        self._lines: dict[tuple[bool, int], tuple[float, float]] = {}  # by kind and batch size, where enough is known
        self._times: dict[tuple[int, bool, int | None], np.ndarray] = {}  # that were asked for

    def plain(self, num_sequences: int) -> float:
        """Milliseconds of a step without drafts."""
        return float(self.by_drafts(num_sequences, False, 0)[0])

    def by_drafts(self, num_sequences: int, drafting: bool, most: int | None = None) -> np.ndarray:
        """Milliseconds [most + 1] of a step that verifies 0, 1, ... drafts; `drafting`: and makes the next ones.

        most: all that there can be, unless it is given.
        """
        key = num_sequences, drafting, most
        if key not in self._times:
            self._times[key] = self._by_drafts(*key)
        return self._times[key]

    def _by_drafts(self, num_sequences: int, drafting: bool, most: int | None) -> np.ndarray:
        possible = num_sequences * self._num_drafts
        counts = np.arange((possible if most is None else most) + 1)
        made = self._draft_ms[num_sequences] if drafting else 0.0
        offset, slope = self._line(drafting, _size_class(num_sequences))
        factors = np.clip(np.exp(offset + slope * counts / possible), 1 / BOUND, BOUND)
        return (self._step_ms[num_sequences + counts] + made) * factors

    def knows_plain(self, num_sequences: int) -> bool:
        """Whether steps of about so many sequences have run without drafts."""
        return len(self._plain[_size_class(num_sequences)]) >= ENOUGH

    def observe(self, num_sequences: int, num_rows: int, drafting: bool, ms: float) -> None:
        """A step took so long. One that verifies drafts and makes none is neither kind, and tells nothing."""
        if ms <= 0 or not (drafting or num_rows == num_sequences):
            return
        size = _size_class(num_sequences)
        if drafting:
            share = (num_rows - num_sequences) / (num_sequences * self._num_drafts)
            expected = self._step_ms[num_rows] + self._draft_ms[num_sequences]
            self._drafting[size].add(share, log(ms / expected))
        else:
            self._plain[size].append(log(ms / self._step_ms[num_rows]))

    def correct(self) -> None:
        """Let the times follow what was observed since; so far they have not."""
        self._lines.clear()
        self._times.clear()

    def fade(self) -> None:
        """Drafts have not been verified for long: what is known of such steps slowly counts less than the curve."""
        for steps in self._drafting:
            steps.fade()

    def _line(self, drafting: bool, size: int) -> tuple[float, float]:
        """Logarithm of the correction without drafts to verify, and what is added with all; of the nearest known size.

        Where no steps of a kind are known, the others tell: the machine is the same.
        """
        for kind in (drafting, not drafting):
            counts = map(len, self._drafting) if kind else map(len, self._plain)
            known = [i for i, count in enumerate(counts) if count >= ENOUGH]
            if known:
                nearest = min(known, key=lambda i: abs(i - size))
                if (kind, nearest) not in self._lines:
                    self._lines[kind, nearest] = self._fit(kind, nearest)
                offset, slope = self._lines[kind, nearest]
                return offset, slope if kind == drafting else 0.0
        return 0.0, 0.0

    def _fit(self, drafting: bool, size: int) -> tuple[float, float]:
        return self._drafting[size].line() if drafting else (median(self._plain[size]), 0.0)


class DraftingSteps:
    """Steps of one batch size that made drafts: logarithms of how many times the expected time they took."""

    def __init__(self) -> None:
        self._steps: list[deque[tuple[float, float]]] = [deque(maxlen=KEPT) for _ in range(SHARES)]  # and shares
        self._latest = [0] * SHARES  # when each of these got one
        self._number = 0

    def __len__(self) -> int:
        """The latest steps of the share of which most is known."""
        return max(map(len, self._steps))

    def add(self, share: float, ratio: float) -> None:
        """A step that verified this share of the possible drafts took exp(ratio) times what was expected."""
        index = min(int(share * SHARES), SHARES - 1)
        self._number += 1
        self._steps[index].append((share, ratio))
        self._latest[index] = self._number
        for steps, latest in zip(self._steps, self._latest, strict=True):
            if self._number - latest > MEMORY:
                steps.clear()

    def fade(self) -> None:
        """Forget the oldest step of each share."""
        for steps in self._steps:
            if steps:
                steps.popleft()

    def line(self) -> tuple[float, float]:
        """Offset and slope over the share, through the medians of the shares of which enough is known."""
        known = [tuple(zip(*steps, strict=True)) for steps in self._steps if len(steps) >= ENOUGH]
        shares = np.array([np.mean(share) for share, _ in known])
        return _fitted(shares, np.array([median(ratio) for _, ratio in known]))


def _fitted(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Offset and slope of a line through points, by ridge regression."""
    spread = x - x.mean()
    slope = float(spread @ (y - y.mean()) / (spread @ spread + RIDGE))
    return float(y.mean() - slope * x.mean()), slope


def _size_class(num_sequences: int) -> int:
    return round(log2(num_sequences))
