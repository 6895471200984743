"""Random workloads in which everything happens at once, and what an engine with everything on made of them.

Drafts of varying number, overlap, padded steps (CUDA graphs on a GPU), preemption, grammars and cancelled requests: the
tokens, log-probabilities and finish reasons are those of an engine that decodes one by one, in turn, unpadded, with
room for everybody.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from deepinfer.engine.decode_curve import DecodeCurve
from deepinfer.engine.engine import Engine
from deepinfer.engine.scheduler import ScheduledBatch
from deepinfer.models.inputs import ModelInputs
from deepinfer.outputs import CompletionOutput, RequestOutput
from deepinfer.params import SamplingParams
from tests.engine.test_overlap import Arrival
from tests.engine.test_speculation import run

NUM_WORKLOADS = 200
SAMPLE = range(0, NUM_WORKLOADS, 10)  # that CI runs


@dataclass(frozen=True)
class Workload:
    """Requests and, by step, those that are cancelled. Requests are named by their place."""

    arrivals: list[Arrival]
    cancels: dict[int, list[str]]


def random_workload(
    number: int, prompt: Callable[[random.Random], list[int]], grammars: Sequence[dict[str, Any]]
) -> Workload:
    """Four to six requests of all kinds. The first has a grammar, the second is cancelled early, others perhaps."""
    rng = random.Random(number)
    count = rng.randint(4, 6)
    structure: list[dict[str, Any] | None] = [rng.choice(grammars), None]
    structure += [rng.choice([None, None, *grammars]) for _ in range(count - 2)]
    arrivals = [
        Arrival(
            rng.randint(0, 4), prompt(rng), random_params(rng, so_args, ignore_eos=index == 1 or rng.random() < 0.7)
        )
        for index, so_args in enumerate(structure)
    ]
    cancels = {arrivals[1].step + rng.randint(1, 3): ["1"]}
    for index in rng.sample(range(2, count), rng.randint(0, 1)):
        cancels.setdefault(arrivals[index].step + rng.randint(3, 25), []).append(str(index))
    return Workload(arrivals, cancels)


def random_params(rng: random.Random, so_args: dict[str, Any] | None, ignore_eos: bool) -> SamplingParams:
    max_tokens = rng.randint(10, 25)
    return SamplingParams(
        max_tokens=max_tokens, temperature=rng.choice([0.0, 0.7, 1.5]), top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([0, 20]), min_p=rng.choice([0.0, 0.02]), presence_penalty=rng.choice([0.0, 1.5]),
        frequency_penalty=rng.choice([0.0, -0.5]), repetition_penalty=rng.choice([1.0, 1.3]), seed=rng.randrange(2**31),
        logprobs=rng.choice([None, 2]), n=rng.choice([1, 1, 2]), so_args=so_args,
        ignore_eos=so_args is None and ignore_eos, logit_bias=rng.choice([None, {7: 4.0}]),
    )  # fmt: skip


# A step of one row takes 10 ms, each further row 1 ms: whether a draft is worth its row depends on its chances.
CURVE = DecodeCurve(((1, 10.0), (101, 110.0)))


def simulate_time(engine: Engine) -> None:
    """Steps take what CURVE says, by the engine's clock: what is drafted depends on no machine and no load."""
    now, forward = [0.0], engine.runner.run

    def timed(inputs: ModelInputs) -> Any:
        now[0] += 1e-3 * CURVE.step_ms(len(inputs.token_ids))
        return forward(inputs)

    engine.runner.run = timed  # type: ignore[method-assign]
    engine._clock = lambda: now[0]


class Watched:
    """Runs workloads on an engine with everything on, and counts what happened.

    Now and then somebody gives way who would fit, amid the prompt or the answer: up to FORCED times a workload.
    """

    FORCED, EVERY = 8, 5

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        speculation = engine.speculation
        assert speculation is not None and speculation.variable_length and engine.overlaps
        assert engine._graphs is not None and engine.grammars is not None
        self.lengths: set[int] = set()  # numbers of drafts that were verified, of sequences that had more
        choose = speculation.draft_lengths

        def watched(sequences: list) -> list[int]:
            lengths = choose(sequences)
            most = speculation.drafter.num_drafts
            self.lengths |= {
                length
                for seq, length in zip(sequences, lengths, strict=True)
                if seq.has_drafts and seq.max_num_tokens - seq.num_tokens > most
            }
            return lengths

        engine.scheduler.draft_lengths = watched
        self._random = random.Random(0)
        self._left = self._steps = 0
        self._schedule = engine.scheduler.schedule
        engine.scheduler.schedule = self._preempt_and_schedule  # type: ignore[method-assign]

    def _preempt_and_schedule(self) -> ScheduledBatch | None:
        scheduler = self.engine.scheduler
        candidates = [*scheduler.running, *scheduler.prefilling]
        self._steps += bool(candidates)
        if candidates and self._left and self._steps % self.EVERY == 0:
            self._left -= 1
            scheduler._preempt(self._random.choice(candidates))
        return self._schedule()

    def totals(self) -> Counter[str]:
        swap, stats = self.engine.scheduler.swap, self.engine.observer.stats.totals
        return Counter({
            "preempted": self.engine.scheduler.num_preemptions,
            "swapped": 0 if swap is None else swap.num_swapped_out,
            "verified": int(stats.get("draft_tokens", 0)),
            "accepted": int(stats.get("accepted", 0)),
        })  # fmt: skip

    def check(self, name: str, workload: Workload, want: dict[str, RequestOutput], tolerance: float) -> Counter[str]:
        """Run a workload and compare it; returns what happened. tolerance: of log-probabilities, absolute."""
        before, self._left, self._steps = self.totals(), self.FORCED, 0
        got = run(self.engine, workload.arrivals, workload.cancels)
        seen = self.totals() - before
        assert got.keys() == want.keys()
        cancelled = {request_id for requests in workload.cancels.values() for request_id in requests}
        for request_id, expected in want.items():
            assert got[request_id].error == expected.error
            for mine, theirs in zip(by_index(got[request_id]), by_index(expected), strict=True):
                reason = mine.finish_reason
                if reason == "abort":
                    assert request_id in cancelled
                    assert mine.token_ids == theirs.token_ids[: len(mine.token_ids)], f"{name}, request {request_id}"
                else:
                    assert (mine.token_ids, reason, mine.stop_reason) == (
                        theirs.token_ids, theirs.finish_reason, theirs.stop_reason
                    ), f"{name}, request {request_id}"  # fmt: skip
                for a, b in zip(mine.logprobs or [], theirs.logprobs or [], strict=reason != "abort"):
                    assert a.logprob == pytest.approx(b.logprob, abs=tolerance)
                seen[str(reason)] += 1
                seen["tokens under a grammar"] += len(mine.token_ids) * (
                    workload.arrivals[int(request_id)].params.so_args is not None
                )
        return seen


def by_index(output: RequestOutput) -> list[CompletionOutput]:
    return sorted(output.outputs, key=lambda completion: completion.index)
