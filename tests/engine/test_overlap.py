"""Overlapped scheduling gives the tokens, log-probabilities and finish reasons of scheduling in turn."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.engine.test_engine_workloads import assert_idle, make_engine, record
from tests.engine.toy_model import VOCAB_SIZE

tokens = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 25))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=draw(st.sampled_from([0.0, 0.7, 1.5])),
        top_p=draw(st.sampled_from([1.0, 0.6])),
        top_k=draw(st.sampled_from([0, 5])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        seed=draw(st.integers(0, 2**31)),
        stop_token_ids=draw(st.lists(tokens, max_size=4)),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, max_tokens)),
        logprobs=draw(st.sampled_from([None, 0, 3])),
        golden_token_ids=draw(st.one_of(st.none(), st.none(), st.lists(tokens, min_size=1, max_size=12))),
        n=draw(st.sampled_from([1, 1, 2])),
        logit_bias=draw(st.sampled_from([None, {7: 4.0, 9: -100.0}])),
    )


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: list[int]
    params: SamplingParams


arrivals = st.builds(Arrival, st.integers(0, 30), st.lists(tokens, min_size=1, max_size=40), sampling_params())


def run(workload: list[Arrival], overlap: bool, num_blocks: int, max_num_seqs: int) -> dict[str, RequestOutput]:
    engine = make_engine(4, num_blocks, max_num_seqs, 16, 40, zero_overhead_scheduling=overlap)
    got: dict[str, RequestOutput] = {}
    step = 0
    while step <= 30 or engine.has_unfinished_requests():
        for number, arrival in enumerate(workload):
            if arrival.step == step:
                engine.add_request(str(number), arrival.prompt, arrival.params)
        record(got, engine.step())
        engine.scheduler.check_integrity()
        step += 1
        assert step < 5000, "the engine spins"
    assert_idle(engine)
    return got


@settings(max_examples=40, deadline=None)
@given(
    workload=st.lists(arrivals, min_size=1, max_size=6),
    num_blocks=st.integers(18, 40),  # one sequence takes 17 at most: preemption is common
    max_num_seqs=st.integers(1, 6),
)
def test_tokens_are_those_of_scheduling_in_turn(workload: list[Arrival], num_blocks: int, max_num_seqs: int) -> None:
    in_turn = run(workload, False, num_blocks, max_num_seqs)
    overlapped = run(workload, True, num_blocks, max_num_seqs)
    assert in_turn.keys() == overlapped.keys() == {str(number) for number in range(len(workload))}
    for request_id, want in in_turn.items():
        got = overlapped[request_id]
        for a, b in zip(
            sorted(want.outputs, key=lambda c: c.index), sorted(got.outputs, key=lambda c: c.index), strict=True
        ):
            assert (a.token_ids, a.finish_reason, a.stop_reason) == (b.token_ids, b.finish_reason, b.stop_reason)
            assert a.logprobs == b.logprobs
