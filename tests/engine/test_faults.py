"""Faults at random places of random steps: their requests end with an error, the others as if nothing had been."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine import engine as engine_module
from deepinfer.engine.engine import Engine
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.engine.test_engine_workloads import assert_idle, record
from tests.engine.test_overlap import Arrival, arrivals
from tests.engine.test_speculation import Setting, make_engine, run, speculative_settings, texts_of

PLACES = ("inputs", "forward", "launch", "read")
faults = st.dictionaries(st.integers(0, 40), st.sampled_from(PLACES), max_size=5)  # by step


class Faulty:
    """Raises at the asked place of a step; what was launched in a step may be read in the next one."""

    def __init__(self, engine: Engine, plan: dict[int, str], patch: pytest.MonkeyPatch) -> None:
        self.plan, self.step, self.raised = plan, 0, 0
        run_model, launch = engine.runner.run, engine._launch_sampling
        build = engine_module.build_model_inputs
        patch.setattr(engine_module, "build_model_inputs", lambda *given: self("inputs") or build(*given))
        engine.runner.run = lambda inputs: self("forward") or run_model(inputs)
        engine._launch_sampling = lambda step: self.watched(launch(step))
        # The sampler is asked inside; a fault in front of it is one of the launch.
        pool = engine.metadata.parameters
        engine.metadata.parameters = lambda *given: self("launch") or pool(*given)

    def __call__(self, place: str) -> None:
        if self.plan.get(self.step) == place:
            del self.plan[self.step]
            self.raised += 1
            raise RuntimeError(f"fault in {place}")

    def watched(self, launched: tuple) -> tuple:
        step = launched[0]
        if step is not None and step.sampled is not None and self.plan.pop(self.step, None) == "read":
            step.sampled = Unreadable(self)
        return launched


class Unreadable:
    def __init__(self, faulty: Faulty) -> None:
        self.faulty = faulty

    def read(self) -> None:
        self.faulty.raised += 1
        raise RuntimeError("fault in read")


def run_with_faults(
    engine: Engine, workload: list[Arrival], plan: dict[int, str]
) -> tuple[Faulty, dict[str, RequestOutput]]:
    got: dict[str, RequestOutput] = {}
    with pytest.MonkeyPatch.context() as patch:
        faulty = Faulty(engine, dict(plan), patch)
        while faulty.step <= 30 or engine.has_unfinished_requests():
            for number, arrival in enumerate(workload):
                if arrival.step == faulty.step:
                    engine.add_request(str(number), arrival.prompt, arrival.params)
            record(got, engine.step())
            engine.scheduler.check_integrity()
            faulty.step += 1
            assert faulty.step < 5000, "the engine spins"
    return faulty, got


def outcome(output: RequestOutput) -> list[tuple]:
    return sorted((c.index, c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs)


@settings(max_examples=40, deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=6), speculative_settings, faults, st.booleans())
def test_others_do_not_notice(workload: list[Arrival], setting: Setting, plan: dict[int, str], drafts: bool) -> None:
    plain = run(make_engine(replace(setting, overlap=False), None), workload)
    engine = make_engine(setting, texts_of(workload, plain) if drafts else None)
    faulty, got = run_with_faults(engine, workload, plan)
    assert_idle(engine)
    swap = engine.scheduler.swap
    assert swap is None or swap.blocks.num_free == swap.blocks.num_blocks - 1
    failed = {request_id for request_id, output in got.items() if output.error is not None}
    assert bool(failed) <= bool(faulty.raised) and got.keys() == plain.keys()
    for request_id, want in plain.items():
        if request_id not in failed:
            assert outcome(got[request_id]) == outcome(want)
            continue
        assert "fault in" in (got[request_id].error or "") and got[request_id].finished
        wanted = {c.index: c for c in want.outputs}
        for completion in got[request_id].outputs:
            tokens = wanted[completion.index].token_ids
            assert completion.token_ids == tokens[: len(completion.token_ids)]
            assert completion.finish_reason in ("error", wanted[completion.index].finish_reason)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("overlap", [False, True])
def test_each_place_fails_the_requests_of_its_step(place: str, overlap: bool) -> None:
    setting = Setting(3, overlap, False, False, 30, 2, 16, 1.0, 0)
    workload = [Arrival(0, [5], SamplingParams(max_tokens=20, ignore_eos=True)) for _ in range(3)]
    faulty, got = run_with_faults(make_engine(setting, None), workload, {4: place})
    assert faulty.raised == 1 and {r for r, output in got.items() if output.error} == {"0", "1"}
