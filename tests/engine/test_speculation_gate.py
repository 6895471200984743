"""An engine whose curve is wrong, on a clock of its own: drafts are made where they pay, and cost nothing elsewhere."""

from __future__ import annotations

import time

import numpy as np
import pytest
from torch import Tensor

from deepinfer.engine.engine import Engine
from deepinfer.models.inputs import ModelInputs
from deepinfer.params import SamplingParams
from deepinfer.speculation.drafter import Drafts, Round
from deepinfer.speculation.slot_tokens import SlotTokens
from deepinfer.speculation.step_times import StepTimes
from tests.engine.test_overlap import Arrival
from tests.engine.test_speculation import Setting, TellTale, make_engine, outcome, run, texts_of

NUM_DRAFTS, SIZE, TOKENS = 4, 4, 400
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
WORKLOAD = [Arrival(0, [5 + number, 9, 2], PARAMS) for number in range(SIZE)]
SETTING = Setting(NUM_DRAFTS, False, False, False, 600, SIZE, 16, 0.0, 0)


class Clock:
    """Milliseconds pass where the model runs and where drafts are made, and nowhere else."""

    def __init__(self, first: float, row: float, draft: float) -> None:
        self.ms, self.first, self.row, self.draft = 0.0, first, row, draft

    def __call__(self) -> float:
        return self.ms / 1e3

    def attach(self, engine: Engine) -> None:
        forward = engine.runner.run

        def timed(inputs: ModelInputs) -> Tensor:
            self.ms += self.first + self.row * len(inputs.token_ids)
            return forward(inputs)

        engine.runner.run = timed


class Confident(TellTale):
    """Says the same of all its drafts, true or not, and takes its time."""

    def __init__(self, clock: Clock, texts: list[list[int]], honesty: float, claimed: float) -> None:
        super().__init__(NUM_DRAFTS, SIZE, texts, honesty, 1)
        self.clock, self.claimed, self.num_rounds = clock, claimed, 0

    def draft(self, state: SlotTokens, round: Round) -> Drafts:
        self.clock.ms += self.clock.draft
        self.num_rounds += 1
        return super().draft(state, round)

    def survival(self, scores: np.ndarray) -> np.ndarray:
        return np.tile(self.claimed ** np.arange(1, NUM_DRAFTS + 1), (len(scores), 1))


@pytest.mark.parametrize("curve", [(10.0, 0.0), (10.0, 1.5)], ids=("flat curve", "steep curve"))
@pytest.mark.parametrize("claimed", [0.3, 0.9])
@pytest.mark.parametrize(
    ("row", "draft", "honesty", "least"),
    [
        (0.1, 2.0, 1.0, 1.4),  # pays
        (3.0, 10.0, 0.6, 0.95),  # rows are dear: 22 ms for 4 of them, 70 for 20
        (0.1, 20.0, 1.0, 0.95),  # drafts are dear
        (0.1, 2.0, 0.0, 0.95),  # drafts are wrong
    ],
)
def test_drafts_pay_or_cost_next_to_nothing(
    curve: tuple[float, float],
    claimed: float,
    row: float,
    draft: float,
    honesty: float,
    least: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(10.0, row, draft)
    for name in ("monotonic", "thread_time"):
        monkeypatch.setattr(time, name, clock)
    plain = make_engine(SETTING, None)
    clock.attach(plain)
    want = run(plain, WORKLOAD)
    plain_ms, clock.ms = clock.ms, 0.0
    engine = make_engine(SETTING, texts_of(WORKLOAD, want))
    clock.attach(engine)
    assert engine.speculation is not None
    drafter = Confident(clock, engine.speculation.drafter.texts, honesty, claimed)
    engine.speculation.drafter = drafter
    times = StepTimes(curve[0] + curve[1] * np.arange(SIZE * (1 + NUM_DRAFTS) + 6), np.full(SIZE + 1, 2.0), NUM_DRAFTS)
    engine.speculation.times = engine.speculation.gate.times = times
    got = run(engine, WORKLOAD)
    for request_id, output in want.items():
        assert outcome(got[request_id]) == outcome(output)
    assert drafter.num_rounds > 0
    if least < 1 or curve[1] == 0 or claimed > 0.5:  # what looks hopeless is tried, but so rarely that little is won
        assert plain_ms / clock.ms > least
    assert plain_ms / clock.ms > 0.95
