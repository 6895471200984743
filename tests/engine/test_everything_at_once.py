"""Overlap on and off: the same outputs with stop conditions, grammar masks, drafts and preemption, all together."""

from __future__ import annotations

import random
import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.engine import Engine
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.engine.test_overlap import Arrival, arrivals
from tests.engine.test_speculation import Setting, make_engine, outcome, run, speculative_settings, texts_of
from tests.engine.toy_grammar import REGEXES, compiler, so_args, text_of
from tests.engine.toy_model import VOCAB_SIZE


@st.composite
def constrained_arrivals(draw: st.DrawFn) -> Arrival:
    """Half of them with a grammar, then of one completion: if one of two fails, the other ends where it just is."""
    arrival = draw(arrivals)
    if draw(st.booleans()):
        return arrival
    number = draw(st.integers(0, 2 * len(REGEXES) - 1))
    params = replace(arrival.params, so_args=so_args(number), n=1, golden_token_ids=None, ignore_eos=False)
    return replace(arrival, params=params)


def outputs(setting: Setting, workload: list[Arrival], texts: list[list[int]] | None) -> tuple[Engine, dict]:
    engine = make_engine(setting, texts)
    engine.grammars = compiler()
    return engine, run(engine, workload)


def outcomes(got: dict[str, RequestOutput]) -> dict[str, tuple]:
    return {request_id: (outcome(output), output.error) for request_id, output in got.items()}


@settings(max_examples=25, deadline=None)
@given(workload=st.lists(constrained_arrivals(), min_size=1, max_size=6), setting=speculative_settings)
def test_overlap_on_and_off_and_without_drafts_are_the_same(workload: list[Arrival], setting: Setting) -> None:
    _, plain = outputs(replace(setting, overlap=False), workload, None)
    texts = texts_of(workload, plain)
    for overlap in (False, True):
        _, got = outputs(replace(setting, overlap=overlap), workload, texts)
        assert outcomes(got) == outcomes(plain)


def test_a_workload_in_which_everything_happens() -> None:
    """What the property above leaves to chance: every kind of request, and all that happens to them, in one run."""
    rng = random.Random(5)
    workload = []
    for number in range(40):
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]), seed=number, max_tokens=rng.randint(8, 25), logprobs=1,
            stop_token_ids=rng.sample(range(VOCAB_SIZE), rng.choice([0, 3])), ignore_eos=number % 4 == 0,
            so_args=so_args(number) if number % 2 else None,
        )  # fmt: skip
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        workload.append(Arrival(rng.randrange(30), prompt, params))
    setting = Setting(
        num_drafts=4,
        overlap=False,
        padded=True,
        swap=True,
        num_blocks=30,
        max_num_seqs=6,
        chunk=16,
        honesty=0.8,
        seed=1,
    )
    _, plain = outputs(setting, workload, None)
    for overlap in (False, True):
        engine, got = outputs(replace(setting, overlap=overlap), workload, texts_of(workload, plain))
        assert outcomes(got) == outcomes(plain)
        swap = engine.scheduler.swap
        assert swap is not None and swap.num_swapped_out > 5
        assert engine.speculation.drafter.num_accepted > 50
    whole = 0
    for number, arrival in enumerate(workload):
        completion = plain[str(number)].outputs[0]
        args = arrival.params.so_args
        if args is not None and completion.finish_reason == "stop" and completion.stop_reason is None:
            text = text_of(completion.token_ids)
            assert "trigger_token_ids" in args or re.fullmatch(args["schema"], text), text
            whole += 1
    reasons = {output.outputs[0].finish_reason for output in plain.values()}
    stops = {output.outputs[0].stop_reason is None for output in plain.values()}
    assert whole > 1 and reasons >= {"stop", "length"} and stops == {True, False}
