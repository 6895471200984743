"""Drafts are made where they pay and nowhere else, whatever the curve said: engines simulated from their times."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from deepinfer.speculation.draft_lengths import draft_lengths
from deepinfer.speculation.gate import LONGEST_PAUSE, DraftGate
from deepinfer.speculation.step_times import BOUND, ENOUGH, KEPT, MEMORY, StepTimes

NUM_DRAFTS = 5
ROWS = 64 * (1 + NUM_DRAFTS)


def affine(first: float, row: float, size: int = ROWS) -> np.ndarray:
    """Milliseconds by rows, or by sequences."""
    return first + row * np.arange(size + 1)


@dataclass
class Machine:
    """Decode steps of a batch that stays: what they really take, and how often a draft is really accepted."""

    step_ms: np.ndarray
    draft_ms: np.ndarray
    rate: float  # chance of a draft if all before it were accepted
    claimed: float  # what the drafter says of that
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    noise: float = 0.0
    has_drafts: bool = False
    drafted: int = 0

    def step(self, gate: DraftGate, size: int) -> tuple[int, float]:
        """Tokens and milliseconds of a step, scheduled as an engine does."""
        makes_drafts = gate.makes_drafts(size)
        survival = np.tile(np.cumprod(np.full(NUM_DRAFTS, self.claimed)), (size, 1))
        lengths = np.zeros(size, np.int64)
        if self.has_drafts:
            step_ms = gate.times.by_drafts(size, makes_drafts)
            lengths, _ = draft_lengths(np.minimum(gate.trust * survival, 1.0), np.full(size, NUM_DRAFTS), step_ms)
        accepted = 0
        for length in lengths:
            while length and self.rng.random() < self.rate:
                accepted, length = accepted + 1, length - 1
        rows = size + int(lengths.sum())
        ms = self.step_ms[rows] + (self.draft_ms[size] if makes_drafts else 0.0)
        ms *= float(np.exp(self.noise * self.rng.standard_normal()))
        gate.times.observe(size, rows, makes_drafts, ms)
        if lengths.any():
            gate.learn(sum(survival[i, :n].sum() for i, n in enumerate(lengths)), accepted)
        if makes_drafts:
            gate.saw(survival)
        self.has_drafts = makes_drafts
        self.drafted += makes_drafts
        return size + accepted, ms

    def rate_of(self, gate: DraftGate, size: int, steps: int) -> float:
        """Tokens a millisecond, as a multiple of steps without drafts."""
        got = np.array([self.step(gate, size) for _ in range(steps)]).sum(axis=0)
        return got[0] / got[1] / (size / self.step_ms[size])


def gate_of(step_ms: np.ndarray, draft_ms: np.ndarray) -> DraftGate:
    return DraftGate(StepTimes(step_ms, draft_ms, NUM_DRAFTS), NUM_DRAFTS)


FLAT, STEEP = affine(10.0, 0.02), affine(10.0, 1.0)
DRAFTS = affine(3.0, 0.1, 64)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 8, 64])
def test_drafts_that_pay_are_made_nearly_always(size: int, noise: float) -> None:
    machine = Machine(FLAT, DRAFTS, rate=0.8, claimed=0.8, noise=noise)
    gate = gate_of(FLAT, DRAFTS)
    always = (1 + sum(0.8**i for i in range(1, 6))) * FLAT[size] / (FLAT[6 * size] + DRAFTS[size])
    assert machine.rate_of(gate, size, 2000) > 0.96 * always > 1.3
    assert machine.drafted > 1900


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 8, 64])
def test_drafts_that_do_not_pay_cost_next_to_nothing(size: int, noise: float) -> None:
    machine = Machine(STEEP, DRAFTS, rate=0.1, claimed=0.1, noise=noise)
    gate = gate_of(STEEP, DRAFTS)
    assert machine.rate_of(gate, size, 2000) > 0.98


@pytest.mark.parametrize("size", [4, 16, 64])
def test_a_curve_that_is_wrong_is_corrected(size: int) -> None:
    """It says that rows cost nothing. They do, and after a few steps that is known."""
    machine = Machine(STEEP, DRAFTS, rate=0.5, claimed=0.5)
    gate = gate_of(FLAT, DRAFTS)
    assert gate.is_open
    machine.rate_of(gate, size, 100)
    informed = gate_of(STEEP, DRAFTS)
    Machine(STEEP, DRAFTS, rate=0.5, claimed=0.5).rate_of(informed, size, 100)
    assert gate.is_open == informed.is_open
    assert machine.rate_of(gate, size, 2000) > 0.97


def test_a_drafter_that_boasts_is_found_out() -> None:
    machine = Machine(STEEP, DRAFTS, rate=0.2, claimed=0.9)
    gate = gate_of(STEEP, DRAFTS)
    machine.rate_of(gate, 8, 200)
    assert gate.trust < 0.6
    assert machine.rate_of(gate, 8, 2000) > 0.95


def test_what_pays_again_is_found_again() -> None:
    machine = Machine(STEEP, DRAFTS, rate=0.05, claimed=0.05)
    gate = gate_of(STEEP, DRAFTS)
    machine.rate_of(gate, 1, 500)
    assert not gate.is_open
    machine.rate = machine.claimed = 0.9  # another kind of text
    for _ in range(20 * LONGEST_PAUSE):
        machine.step(gate, 1)
        if gate.is_open:
            break
    assert gate.is_open
    assert machine.rate_of(gate, 1, 500) > 1.5


def test_another_batch_size_is_another_question() -> None:
    """Steps of 64 are too steep and those of 1 are not: the gate follows the batch at once."""
    step_ms = np.concatenate((np.full(7, 10.0), affine(10.0, 1.0)[7:]))
    machine = Machine(step_ms, DRAFTS, rate=0.6, claimed=0.6)
    gate = gate_of(step_ms, DRAFTS)
    for size, opens in ((1, True), (64, False), (1, True), (64, False)):
        for _ in range(40):
            machine.step(gate, size)
        assert gate.is_open == opens


def test_steps_without_drafts_follow_the_median() -> None:
    times = StepTimes(FLAT, DRAFTS, NUM_DRAFTS)
    for _ in range(ENOUGH - 1):
        times.observe(4, 4, False, 2 * FLAT[4])
    times.correct()
    assert times.plain(4) == FLAT[4]  # too little is known
    times.observe(4, 4, False, 2 * FLAT[4])
    assert times.plain(4) == FLAT[4]
    times.correct()
    assert times.plain(4) == pytest.approx(2 * FLAT[4])
    assert times.plain(64) == pytest.approx(2 * FLAT[64])  # the nearest that is known
    assert times.by_drafts(4, True)[8] == pytest.approx(2 * (FLAT[12] + DRAFTS[4]))  # nothing of that kind is known
    for ms in (1e6, 2 * FLAT[4], 2 * FLAT[4], 1e-6):  # disturbances
        times.observe(4, 4, False, ms)
    times.correct()
    assert times.plain(4) == pytest.approx(2 * FLAT[4])
    for _ in range(KEPT):
        times.observe(4, 4, False, 100 * FLAT[4])
    times.correct()
    assert times.plain(4) == pytest.approx(BOUND * FLAT[4])


def test_steps_with_drafts_follow_a_line() -> None:
    """The curve is flat, the steps are steep; what was tried tells of what was not, disturbed steps of nothing."""
    times, rng = StepTimes(FLAT, DRAFTS, NUM_DRAFTS), np.random.default_rng(0)

    def truth(rows: int) -> float:
        return float((FLAT[rows] + DRAFTS[4]) * np.exp(0.2 + 0.6 * (rows - 4) / 20))

    for number in range(64):
        rows = int(rng.choice([4, 8, 16]))
        times.observe(4, rows, True, truth(rows) * (5.0 if number % 9 == 0 else 1.0))
    times.correct()
    for rows in (4, 12, 24):
        assert times.by_drafts(4, True)[rows - 4] == pytest.approx(truth(rows), rel=0.08)
    assert times.plain(4) == pytest.approx(FLAT[4] * np.exp(0.2), rel=0.08)  # the machine is the same
    for _ in range(64):
        times.fade()
    times.correct()
    assert times.by_drafts(4, True)[20] == FLAT[24] + DRAFTS[4]


def test_what_other_shares_took_is_remembered_for_long_but_not_for_ever() -> None:
    """All drafts are verified for long; that fewer rows would take as much time was found out before."""
    times = StepTimes(STEEP, DRAFTS, NUM_DRAFTS)
    flat = STEEP[24] + DRAFTS[4]
    for rows in (9, 24):
        for _ in range(ENOUGH):
            times.observe(4, rows, True, flat)
    for _ in range(MEMORY - ENOUGH):
        times.observe(4, 24, True, flat)
    times.correct()
    assert times.by_drafts(4, True)[5] == pytest.approx(flat, rel=0.1)
    for _ in range(ENOUGH + 1):
        times.observe(4, 24, True, flat)
    times.correct()
    assert times.by_drafts(4, True)[5] == STEEP[9] + DRAFTS[4]


def test_steps_that_verify_and_make_none_teach_nothing() -> None:
    times = StepTimes(FLAT, DRAFTS, NUM_DRAFTS)
    for _ in range(KEPT):
        times.observe(4, 24, False, 1e3)
    times.correct()
    assert times.plain(4) == FLAT[4]
