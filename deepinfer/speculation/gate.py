"""DraftGate: whether drafts are made at all.

Where they do not pay, making them must cost nothing: no drafts, no rows, and no more than PROBE_SHARE of the time to
find out whether that has changed. The gate compares the tokens a millisecond that steps with drafts are expected to
give with those of steps without, by the times that this engine measures (StepTimes) and the chances of the latest
drafts, corrected by how many were really accepted.
"""

from __future__ import annotations

import numpy as np

from deepinfer.speculation.acceptance import PRIOR_RATE
from deepinfer.speculation.draft_lengths import expected_rates
from deepinfer.speculation.step_times import StepTimes

WORTH = 1.01  # times as many tokens that fewer drafts must be expected to give than all
OPENS = 1.03  # the expected gain from which drafts are made; they are until there is none
SOON, REVIEW = 8, 16  # the gain is looked at after each of the first steps with drafts, later after so many
CHECK_AFTER, CHECK_EVERY = 4, 512  # steps with drafts, where the time without is not known and where it is
SURE, CHECK_RARELY = 1.3, 4096  # the gain from which the latter is rare
CHECK_STEPS = 4  # without drafts; the first of them verifies the latest, and tells nothing
PROBE_SHARE = 0.01  # of the time may go into drafts that are not expected to pay
SHORTEST_PAUSE, LONGEST_PAUSE = 16, 1024  # steps between two probes: twice as many each time that it stays closed
PAID = 64  # steps with drafts that count as a success
MEMORY = 24  # drafted blocks, or those of one step, that are remembered
TRUST = 0.1, 1.25  # bounds of how many drafts are accepted of those expected
TRUST_MEMORY = 1000.0  # expected drafts after which what was seen before counts half
TRUST_PRIOR = 20.0


class DraftGate:
    """Asked once a decode step, before the step is launched.

    `takes_all`: all drafts are verified, because choosing among them is not worth it; that costs the host nothing.
    """

    def __init__(self, times: StepTimes, num_drafts: int) -> None:
        self.times = times
        self.is_open = True
        self.takes_all = False
        self.profile = np.cumprod(np.full(num_drafts, PRIOR_RATE))  # the mean of the latest drafts' chances
        self._seen = self.profile[None]  # those chances [N, K], once there have been any
        self._has_seen = False
        self._has_news = False  # since the latest review
        self._steps = 0  # since the gate opened or closed, or since the latest check or probe
        self._left = 0  # steps that are left of it
        self._failures = 0  # times that drafts did not pay since they last did
        self._reviewed = 0  # sequences at the latest review
        self._gain = 1.0  # that was expected then: tokens a millisecond, as a multiple of those without drafts
        self._expected = self._accepted = 0.0

    @property
    def wants_chances(self) -> bool:
        """Whether to show it the chances of drafts now: those of some steps will do while the gate is open."""
        return not self.is_open or self._steps < SOON or self._steps % REVIEW == 0

    @property
    def trust(self) -> float:
        """Drafts accepted of each that was expected to be."""
        ratio = (self._accepted + TRUST_PRIOR) / (self._expected + TRUST_PRIOR)
        return min(max(ratio, TRUST[0]), TRUST[1])

    def makes_drafts(self, num_sequences: int) -> bool:
        """Whether the next step, of so many sequences, makes drafts for the one behind it."""
        self._steps += 1
        resized = 4 * abs(num_sequences - self._reviewed) > self._reviewed
        if resized or self._has_news:
            self._reviewed = num_sequences
            self._review(num_sequences)
        return self._drafts_but_for_checks(num_sequences) if self.is_open else self._probes(num_sequences)

    def _drafts_but_for_checks(self, num_sequences: int) -> bool:
        if self._steps == PAID:
            self._failures = 0
        if self._left:
            self._left -= 1
            return False
        after = CHECK_RARELY if self._gain >= SURE else CHECK_EVERY
        if self._steps < (after if self.times.knows_plain(num_sequences) else CHECK_AFTER):
            return True
        self._steps, self._left = 0, CHECK_STEPS - 1
        return False

    def _probes(self, num_sequences: int) -> bool:
        if self._left:
            self._left -= 1
            return True
        length = -(-8 // num_sequences)
        extra = float(self.times.by_drafts(num_sequences, True, 0)[0]) / self.times.plain(num_sequences) - 1.0
        pause = max(extra * length / PROBE_SHARE, SHORTEST_PAUSE << min(self._failures, 10))
        if self._steps < min(pause, LONGEST_PAUSE):
            return False
        self._steps, self._left = 0, length - 1
        self._failures += 1
        self.times.fade()
        self._forget(0.9)
        return True

    def saw(self, survival: np.ndarray) -> None:
        """Chances [N, K] of drafts that have been made."""
        before = self._seen if self._has_seen else self._seen[:0]
        self._has_seen = self._has_news = True
        self._seen = np.concatenate((before, np.nan_to_num(survival)))[-max(MEMORY, len(survival)) :]

    def learn(self, num_expected: float, num_accepted: int) -> None:
        """Of the drafts of a step so many were expected to be accepted, and were."""
        if self._expected > TRUST_MEMORY:
            self._forget(0.5)
        self._expected += num_expected
        self._accepted += num_accepted

    def _rates(self, num_sequences: int) -> tuple[float, float]:
        """Tokens a millisecond of steps with drafts like the latest: with the best numbers of drafts, and with all."""
        step_ms = self.times.by_drafts(num_sequences, True)
        return expected_rates(np.minimum(self.trust * self._seen, 1.0), num_sequences, step_ms)

    def _review(self, num_sequences: int) -> None:
        self._has_news = False
        self.times.correct()
        self.profile = self._seen.mean(axis=0)
        best, of_all = self._rates(num_sequences)
        self.takes_all = best <= WORTH * of_all
        self._gain = best * self.times.plain(num_sequences) / num_sequences
        opens = self._gain >= (1.0 if self.is_open else OPENS)
        if opens != self.is_open:
            self.is_open, self._steps, self._left = opens, 0, 0

    def _forget(self, share: float) -> None:
        self._expected *= share
        self._accepted *= share
