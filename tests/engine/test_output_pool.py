"""Pooled outputs say what new ones say, for exactly one extra round."""

from __future__ import annotations

import copy

import pytest

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.output_pool import RequestOutputPool
from deepinfer.observability.memory import StaleReadError
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.engine.toy_model import ToyRunner


def make_engine(pooled: bool, overlapped: bool = False) -> Engine:
    config = EngineConfig(block_size=8, num_blocks=20, max_num_seqs=4, zero_overhead_scheduling=overlapped, seed=1)
    engine = Engine(ToyRunner(20, 8, 4), config)
    if pooled:
        engine.outputs = RequestOutputPool(debug=True)
    return engine


def add_requests(engine: Engine) -> None:
    engine.add_request("two", [1, 2], SamplingParams(n=2, seed=3, max_tokens=5, logprobs=2, ignore_eos=True))
    engine.add_request("greedy", [3], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    engine.add_request("short", [4], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))


def without_times(outputs: list[RequestOutput]) -> list[tuple]:
    return [(o.request_id, o.prompt_token_ids, copy.deepcopy(o.outputs), o.finished, o.error) for o in outputs]


@pytest.mark.parametrize("overlapped", [False, True])
def test_pooled_outputs_equal_new_ones(overlapped: bool) -> None:
    plain, pooled = make_engine(False, overlapped), make_engine(True, overlapped)
    for engine in (plain, pooled):
        add_requests(engine)
    num_steps = 0
    while plain.has_unfinished_requests():
        assert without_times(pooled.step()) == without_times(plain.step())
        num_steps += 1
        if num_steps == 3:
            plain.abort_request("two", 1)
            pooled.abort_request("two", 1)
    assert num_steps > 5 and not pooled.has_unfinished_requests()


def test_outputs_are_valid_for_one_extra_round_and_a_stale_read_is_caught() -> None:
    engine = make_engine(True)
    add_requests(engine)
    first = engine.step()
    said = without_times(first)
    engine.step()
    assert without_times(first) == said  # the extra round
    completion = first[0].outputs[0]
    engine.step()
    stale = 0
    for resource, field in ((first[-1], "finished"), (first[0], "outputs"), (completion, "token_ids")):
        try:
            getattr(resource, field)
        except StaleReadError:
            stale += 1
    assert stale > 0  # those that this step has not taken again


def test_a_caller_that_keeps_outputs_is_told_so() -> None:
    engine = make_engine(True)
    engine.add_request("a", [1], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    kept = [output for _ in range(3) for output in engine.step()]
    engine.abort_request("a")
    engine.outputs.next_round()
    with pytest.raises(StaleReadError, match="RequestOutput was read after its round"):
        kept[1].request_id  # noqa: B018


def test_steady_decoding_makes_no_new_outputs() -> None:
    engine = make_engine(True)
    engine.outputs = RequestOutputPool()
    engine.add_request("a", [1], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    made = {id(output) for _ in range(40) for output in engine.step()}
    assert not engine.has_unfinished_requests() and len(made) <= 3


def test_without_a_pool_outputs_stay_valid() -> None:
    engine = make_engine(False)
    add_requests(engine)
    kept = []
    while engine.has_unfinished_requests():
        kept += engine.step()
    assert sum(len(c.token_ids) for o in kept for c in o.outputs) == 2 * 5 + 9 + 1
