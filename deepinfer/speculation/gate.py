"""DraftGate: whether drafts are made at all.

For each batch size (powers of two) the latest steps with drafts and those without are measured: what tokens they gave
and what time they took. The kind that gives more tokens a millisecond is taken; the other one is tried again, so rarely
that this costs less than half a per cent of the time. Nothing is concluded from other sizes or from what was expected.

In steps with drafts, how many are verified follows the chances of the drafts (speculation/draft_lengths.py), corrected
by how many were really accepted of those expected.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

import numpy as np

from deepinfer.speculation.acceptance import PRIOR_RATE
from deepinfer.speculation.draft_lengths import expected_rates
from deepinfer.speculation.step_times import StepTimes, size_class

OPENS = 1.02  # times as many tokens that steps with drafts must give before they are taken again
DOUBT = 4.0  # gain that steps with drafts may lack, by the blocks (a sequence's drafts in a step) that are known
ENOUGH = 3  # steps without which nothing is concluded
KEPT_STEPS, KEPT_BLOCKS = 16, 256  # latest that count
TRIAL_STEPS, TRIAL_BLOCKS = 3, 8  # of a trial, without its first step: that one is of neither kind
SETTLING = 2  # first steps without drafts in a row, which find the caches full of what drafts need, and tell nothing
TRIAL_SHARE, CHECK_SHARE = 0.004, 0.001  # of the time may be lost in trials of drafts, and of steps without
SHORTEST_PAUSE, LONGEST_PAUSE = 16, 1024  # steps between trials
DISTURBED = 1.25  # times the median that a step counts for, at most
DECIDE_STEPS, DECIDE_BLOCKS = 4, 32  # with drafts, between two looks at whether they pay
REVIEW = 16  # steps with drafts between two looks at their chances
WORTH = 1.03  # times as many tokens that fewer drafts must be expected to give than all
SEEN = 24  # drafted blocks, or those of one step, whose chances are remembered
TRUST = 0.1, 1.25  # bounds of how many drafts are accepted of those expected
TRUST_MEMORY = 1000.0  # expected drafts after which what was seen before counts half
TRUST_PRIOR = 20.0


class Rate:
    """Tokens of the latest steps of a kind by the time they took; both as multiples of plain steps by the curve."""

    def __init__(self, num_kept: int) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=num_kept)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, tokens: float, time: float) -> None:
        self._steps.append((tokens, time))

    def forget(self) -> None:
        """The oldest quarter, before new steps are tried."""
        for _ in range(len(self._steps) // 4):
            self._steps.popleft()

    def means(self) -> tuple[float, float]:
        """Tokens and time of a step; of at least one."""
        limit = DISTURBED * median(time for _, time in self._steps)
        return fmean(tokens for tokens, _ in self._steps), fmean(min(time, limit) for _, time in self._steps)


class BatchSize:
    """What is known of steps of about so many sequences."""

    def __init__(self, num_sequences: int) -> None:
        self.num_sequences = num_sequences
        self.trial = max(1, TRIAL_BLOCKS // num_sequences)
        self.decide = max(DECIDE_STEPS, DECIDE_BLOCKS // num_sequences)
        self.plain = Rate(KEPT_STEPS)
        self.drafting = Rate(max(KEPT_STEPS, KEPT_BLOCKS // num_sequences))
        self.is_open = True
        self.takes_all = False
        self.num_drafted = 0  # steps with drafts
        self._steps = 0  # since the latest change or trial
        self._left = 0  # steps of a trial
        self._num_plain = 0  # latest steps without drafts in a row
        self._pause = max(ENOUGH, self.trial) + 1

    def makes_drafts(self) -> bool:
        """Of the next step."""
        if self._left:
            self._left -= 1
            return not self.is_open
        self._steps += 1
        if self._steps <= self._pause:
            return self.is_open
        tried = self.plain if self.is_open else self.drafting
        tried.forget()
        self._steps, self._left = 0, SETTLING + TRIAL_STEPS if self.is_open else self.trial
        self._pause = SHORTEST_PAUSE
        return not self.is_open

    def observe(self, drafting: bool, tokens: float, time: float) -> None:
        """A step of one of the kinds."""
        self.num_drafted += drafting
        self._num_plain = 0 if drafting else self._num_plain + 1
        if 0 < self._num_plain <= SETTLING:
            return
        (self.drafting if drafting else self.plain).add(tokens, time)
        if not drafting and not self.is_open or drafting and self.is_open and self.num_drafted % self.decide:
            return
        if min(len(self.plain), len(self.drafting)) < ENOUGH:
            return
        gain, doubt = self._gain(), DOUBT / (len(self.drafting) * self.num_sequences)
        if gain < 1.0 - doubt if self.is_open else gain > OPENS:
            self.is_open = not self.is_open
            self._steps = self._left = 0
        self._pause = self._next_pause(gain)

    def _gain(self) -> float:
        (drafted, drafting_time), (plain, plain_time) = self.drafting.means(), self.plain.means()
        return drafted / drafting_time * plain_time / plain

    def _next_pause(self, gain: float) -> int:
        """Steps to the next trial: what it loses is to be a small share of what they take."""
        now, then, length, share = self.plain, self.drafting, self.trial + 1, TRIAL_SHARE
        if self.is_open:
            now, then, length, share, gain = then, now, 1 + SETTLING + TRIAL_STEPS, CHECK_SHARE, 1 / gain
        lost = length * then.means()[1] / now.means()[1] * max(1.0 - gain, 0.0)  # steps
        return int(min(max(SHORTEST_PAUSE, lost / share), LONGEST_PAUSE))


class DraftGate:
    """Asked once a decode step, before the step is launched; told what became of the steps."""

    def __init__(self, times: StepTimes, num_drafts: int) -> None:
        self.times = times
        self.profile = np.cumprod(np.full(num_drafts, PRIOR_RATE))  # the mean of the latest drafts' chances
        self._seen = np.empty((0, num_drafts))  # those chances [N, K]
        self._expected = self._accepted = 0.0
        self._sizes: dict[int, BatchSize] = {}
        self.size = self.of(1)  # of the latest step

    def of(self, num_sequences: int) -> BatchSize:
        """What is known of steps of about so many sequences."""
        number = size_class(num_sequences)
        if number not in self._sizes:
            self._sizes[number] = BatchSize(1 << number)
        return self._sizes[number]

    @property
    def takes_all(self) -> bool:
        """Whether all drafts are verified: choosing among them is not worth it, and this costs the host nothing."""
        return self.size.takes_all

    @property
    def wants_chances(self) -> bool:
        """Whether to show it the chances of drafts now: those of some steps will do."""
        return self.size.num_drafted % REVIEW == 0 or not self.size.is_open

    @property
    def trust(self) -> float:
        """Drafts accepted of each that was expected to be."""
        ratio = (self._accepted + TRUST_PRIOR) / (self._expected + TRUST_PRIOR)
        return min(max(ratio, TRUST[0]), TRUST[1])

    def chances(self, survival: np.ndarray) -> np.ndarray:
        """The same chances as far as they are to be trusted."""
        return np.minimum(self.trust * survival, 1.0)

    def makes_drafts(self, num_sequences: int) -> bool:
        """Whether the next step, of so many sequences, makes drafts for the one behind it."""
        self.size = self.of(num_sequences)
        return self.size.makes_drafts()

    def observe(
        self, num_sequences: int, num_drafts: int, num_tokens: int, had_drafts: bool, makes_drafts: bool, ms: float
    ) -> None:
        """A step of so many sequences verified so many drafts, gave so many tokens and took so long.

        had_drafts: it could have verified some.
        """
        if ms <= 0:
            return
        if makes_drafts:
            self.times.observe(num_sequences, num_drafts, ms)
        if had_drafts == makes_drafts:  # others begin or end a row of steps with drafts
            time = ms / self.times.alone(num_sequences)
            self.of(num_sequences).observe(makes_drafts, num_tokens / num_sequences, time)

    def saw(self, survival: np.ndarray, num_sequences: int) -> None:
        """Chances [N, K], N >= 1, of drafts that have been made."""
        self._seen = np.concatenate((self._seen, np.nan_to_num(survival)))[-max(SEEN, len(survival)) :]
        self.profile = self._seen.mean(axis=0)
        self.times.correct()
        step_ms = self.times.by_drafts(num_sequences, True)
        best, of_all = expected_rates(self.chances(self._seen), num_sequences, step_ms)
        self.of(num_sequences).takes_all = best <= WORTH * of_all

    def learn(self, num_expected: float, num_accepted: int) -> None:
        """Of the drafts of a step so many were expected to be accepted, and were."""
        if self._expected > TRUST_MEMORY:
            self._expected *= 0.5
            self._accepted *= 0.5
        self._expected += num_expected
        self._accepted += num_accepted
