"""Whole engines on the clocks of recorded machines: lengths by the curve give at least what a fixed number gives.

The host and the device have a clock each, as on a GPU with overlap: a step is launched when the host gets to it, begins
when the device is free, and is read when it is done. A model that always says the same stands in for the real one, and
drafts are right as often as their confidences say, which differ from sequence to sequence and from round to round.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.config.engine import EngineConfig
from deepinfer.config.speculative import SpeculativeConfig
from deepinfer.engine.decode_curve import DecodeCurve
from deepinfer.engine.drafters import times_by_rows
from deepinfer.engine.engine import Engine
from deepinfer.engine.step import LaunchedStep
from deepinfer.engine.verification import Speculation
from deepinfer.models.inputs import ModelInputs
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from deepinfer.speculation.drafter import Drafts, Round
from deepinfer.speculation.slot_tokens import SlotTokens
from tests.speculation.machines import points

WARM_UP = 60  # steps in which an engine learns what steps take here
NUM_DRAFTS, MOST, VOCAB_SIZE, TOKEN, OTHER = 5, 64, 8, 5, 6
CAPTURED = [1, 2, 4, *range(8, 64, 8), *range(64, 384, 32), 384]


@dataclass(frozen=True)
class Machine:
    """Milliseconds: `points` of a step by rows and of drafts by sequences, as an engine measures them when it starts;
    what the device takes beside them in a step (sampling, copies), and the host for a step and for each of its rows."""

    points: tuple[tuple[int, float], ...]
    draft_points: tuple[tuple[int, float], ...]
    rest: float = 0.0
    host: float = 0.0
    host_row: float = 0.0
    sizes: tuple[int, ...] | None = None  # rows that steps are padded to
    overlaps: bool = True

    def step_ms(self) -> np.ndarray:
        curve = DecodeCurve(self.points)
        return times_by_rows(curve, MOST * (1 + NUM_DRAFTS) + 1, None if self.sizes is None else list(self.sizes))

    def draft_ms(self) -> np.ndarray:
        return np.interp(np.arange(MOST + 1), *zip(*self.draft_points, strict=True))


NANO = points("nano on an H200", "step_ms"), points("nano on an H200", "draft_ms")
MACHINES = {
    "nano, device-bound": Machine(*NANO, rest=0.3, host=0.6, host_row=0.001, sizes=tuple(CAPTURED)),
    "nano, host-bound": Machine(*NANO, rest=0.3, host=2.4, host_row=0.002, sizes=tuple(CAPTURED)),
    "large": Machine(
        points("large", "step_ms"),
        points("large", "draft_ms"),
        rest=0.5,
        host=1.0,
        host_row=0.001,
        sizes=tuple(CAPTURED),
    ),
    "CPU": Machine(
        points("nano on a CPU", "step_ms"), points("nano on a CPU", "draft_ms"), host=0.8, host_row=0.01, overlaps=False
    ),
}


class Clocks:
    """When the host gets to it, and when the device is done with what it was given."""

    def __init__(self, machine: Machine, noise: float, seed: int) -> None:
        self.machine, self.noise, self.random = machine, noise, np.random.default_rng(seed)
        self.host = self.device = 0.0
        self.step_ms, self.draft_ms = machine.step_ms(), machine.draft_ms()
        self.done: dict[int, float] = {}  # of steps that are not read yet

    def __call__(self) -> float:
        return self.host / 1e3

    def launch(self, ms: float) -> None:
        """Work for the device."""
        disturbed = 4.0 if self.random.random() < self.noise / 10 else 1.0
        ms *= disturbed * float(np.exp(self.noise * self.random.standard_normal()))
        self.device = max(self.device, self.host) + ms
        if not self.machine.overlaps:
            self.host = self.device

    def attach(self, engine: Engine) -> None:
        """Reading a step waits for what was launched up to its sampling."""
        launch, finish = engine._launch_sampling, engine._finish

        def launch_sampling(step: LaunchedStep | None) -> tuple[LaunchedStep | None, list[RequestOutput]]:
            launched, failed = launch(step)
            self.done[id(launched)] = self.device
            return launched, failed

        def read(step: LaunchedStep | None) -> list[RequestOutput]:
            self.host = max(self.host, self.done.pop(id(step), 0.0))
            return finish(step)

        engine._launch_sampling, engine._finish = launch_sampling, read


class Runner:
    """A model that always says TOKEN."""

    vocab_size, max_model_len, num_blocks = VOCAB_SIZE, 1 << 20, MOST * 60 + 2

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.logits = torch.zeros(MOST * (1 + NUM_DRAFTS), VOCAB_SIZE)
        self.logits[:, TOKEN] = 1.0

    def run(self, inputs: ModelInputs) -> Tensor:
        clocks, rows = self.clocks, len(inputs.logits_rows)
        clocks.host += clocks.machine.host + clocks.machine.host_row * rows
        clocks.launch(clocks.step_ms[rows] + clocks.machine.rest)
        return self.logits[:rows]

    def cache_rows(self) -> None: ...


class Drafter:
    """Drafts whose confidences are right: easy and hard sequences, and easy and hard places in them."""

    probabilities = None
    learns = True
    num_drafts = NUM_DRAFTS

    def __init__(self, clocks: Clocks, easiness: float) -> None:
        self.clocks = clocks
        self.easiness = easiness
        self.random = np.random.default_rng(1)
        self.of_slot = self.random.normal(easiness, 1.2, MOST + 1)
        self.num_rounds = 0

    def expect(self, drafts: bool) -> None: ...

    def prefilled(self, inputs: ModelInputs) -> None: ...

    def resumed(self, slot: int, token_ids: object) -> None: ...

    def chosen(self, state: SlotTokens, round: Round) -> None: ...

    def draft(self, state: SlotTokens, round: Round) -> Drafts:
        self.clocks.launch(self.clocks.draft_ms[len(round.slots)])
        self.num_rounds += 1
        logits = self.of_slot[round.slots.numpy()][:, None] + self.random.normal(0, 1.0, (len(round.slots), NUM_DRAFTS))
        confidences = 1 / (1 + np.exp(-logits))
        right = self.random.random(confidences.shape) < confidences
        return Drafts(torch.from_numpy(np.where(right, TOKEN, OTHER)), torch.from_numpy(confidences))

    def survival(self, scores: np.ndarray) -> np.ndarray:
        return np.cumprod(scores, axis=1)

    def learn(self, scores: np.ndarray, num_verified: np.ndarray, num_accepted: np.ndarray) -> None: ...


def tokens_a_ms(
    machine: Machine,
    size: int,
    kind: str,
    easiness: float,
    noise: float,
    monkeypatch: pytest.MonkeyPatch,
    num_steps: int = 300,
) -> float:
    """Of steps of `size` sequences that stay; kind: off, variable or fixed."""
    clocks = Clocks(machine, noise, 7)
    for name in ("monotonic", "thread_time"):
        monkeypatch.setattr(time, name, clocks)
    speculative = None
    if kind != "off":
        speculative = SpeculativeConfig(method="ngram", variable_length=kind == "variable")
    config = EngineConfig(
        max_num_seqs=MOST, num_blocks=Runner.num_blocks, watermark=0.0, max_num_batched_tokens=4096,
        zero_overhead_scheduling=machine.overlaps, speculative_config=speculative,
    )  # fmt: skip
    drafter = None if kind == "off" else Drafter(clocks, easiness)
    engine = Engine(Runner(clocks), config, (), None, drafter)
    if drafter is not None:
        engine.speculation = speculation = Speculation(
            drafter, engine.speculation.state, clocks.step_ms, clocks.draft_ms, kind == "variable", machine.overlaps
        )
        engine.scheduler.draft_lengths = speculation.draft_lengths
    clocks.attach(engine)
    params = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True)
    for number in range(size):
        engine.add_request(str(number), [3] * 8, params)
    while engine.scheduler.waiting or engine.scheduler.prefilling or engine.scheduler.prompted:
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    start, before = clocks.host, engine.num_output_tokens
    for _ in range(num_steps):
        engine.step()
    return (engine.num_output_tokens - before) / (clocks.host - start)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("name", MACHINES)
def test_lengths_by_the_curve_give_what_a_fixed_number_gives_or_more(
    name: str, size: int, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = MACHINES[name]
    off, variable, fixed = (
        tokens_a_ms(machine, size, kind, 0.6, noise, monkeypatch) for kind in ("off", "variable", "fixed")
    )
    assert variable > 0.97 * off
    if name.startswith("nano"):  # all drafts are worth it, or nearly
        assert variable > 0.995 * fixed > 1.5 * off
    elif name == "CPU" or size > 16:
        assert variable > 1.05 * fixed


@pytest.mark.parametrize("name", MACHINES)
def test_alone_all_drafts_pay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    off, variable, fixed = (
        tokens_a_ms(MACHINES[name], 1, kind, 0.6, 0.05, monkeypatch) for kind in ("off", "variable", "fixed")
    )
    assert variable > 1.4 * off and variable > 0.98 * fixed


@pytest.mark.parametrize("size", [1, 16, 64])
def test_a_text_that_nobody_can_draft_costs_next_to_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    off, variable, fixed = (
        tokens_a_ms(MACHINES["large"], size, kind, -5.0, 0.05, monkeypatch) for kind in ("off", "variable", "fixed")
    )
    assert variable > 0.97 * off > 1.2 * fixed
