"""The garbage collector is given back as it was, and what a step hands out lives one extra round."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.observability.memory import CollectorHold, DeferredRelease, StaleReadError, retire, revive
from deepinfer.params import SamplingParams
from tests.engine.toy_model import ToyRunner


@pytest.fixture(autouse=True)
def collector_is_on() -> Iterator[None]:
    assert gc.isenabled() and gc.get_freeze_count() == 0
    yield
    assert gc.isenabled() and gc.get_freeze_count() == 0


class Node:
    """Garbage that only the cyclic collector can find."""

    def __init__(self) -> None:
        self.me = self


def test_collects_at_the_interval_and_only_then() -> None:
    hold = CollectorHold(interval=10)
    hold.acquire()
    assert not gc.isenabled()
    gone = weakref.ref(Node())
    for _ in range(9):
        hold.step()
    assert gone() is not None
    hold.step()
    assert gone() is None
    hold.release()


def test_two_engines_share_the_collector() -> None:
    first, second = CollectorHold(5), CollectorHold(5)
    first.acquire()
    first.acquire()  # holding already
    second.acquire()
    first.release()
    first.release()
    assert not gc.isenabled()
    second.release()


def test_a_dropped_engine_gives_the_collector_back() -> None:
    hold = CollectorHold(5)
    hold.acquire()
    del hold
    assert gc.isenabled()


def test_a_program_without_collector_stays_without() -> None:
    gc.disable()
    try:
        hold = CollectorHold(1)
        hold.acquire()
        gone = weakref.ref(Node())
        hold.step()
        assert gone() is not None
        hold.release()
        assert not gc.isenabled()
    finally:
        gc.enable()
    gc.collect()


def test_interval_zero_leaves_the_collector_alone() -> None:
    hold = CollectorHold(0)
    hold.acquire()
    assert gc.isenabled()
    hold.step()


def make_engine() -> Engine:
    return Engine(ToyRunner(20, 8, 4), EngineConfig(block_size=8, num_blocks=20, max_num_seqs=4))


PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.mark.parametrize(("kind", "num_steps"), [("normal", 3), ("completion", 30)])
def test_an_engine_collects_at_its_kind_s_interval(kind: str, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_GC_INTERVAL_STEP", "3")
    engine = Engine(ToyRunner(20, 8, 4), EngineConfig(block_size=8, num_blocks=20, max_num_seqs=4, kind=kind))
    engine.add_request("a", [1, 2], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    gone = weakref.ref(Node())
    steps = 0
    while gone() is not None and steps < 50:
        engine.step()
        steps += 1
    assert steps == num_steps
    engine.abort_request("a")


def test_an_engine_holds_the_collector_exactly_while_it_has_work() -> None:
    engine = make_engine()
    assert gc.isenabled()
    for _ in range(2):
        engine.add_request("a", [1, 2], PARAMS)
        engine.add_request("b", [3], PARAMS)
        while engine.has_unfinished_requests():
            assert not gc.isenabled()
            engine.step()
        assert gc.isenabled()


def test_an_abort_and_a_failed_step_give_it_back_too() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2], PARAMS)
    engine.abort_request("a")
    assert gc.isenabled()
    engine.runner.poison = 7  # type: ignore[attr-defined]
    engine.add_request("b", [7], PARAMS)
    assert engine.step()[0].error and gc.isenabled()


def test_dropping_an_engine_that_has_work_gives_it_back() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2], PARAMS)
    assert not gc.isenabled()
    del engine
    gc.collect()


@dataclass(slots=True)
class Output:
    tokens: list[int]


@given(st.lists(st.integers(0, 4), max_size=30))
def test_everything_is_released_exactly_one_round_late(counts: list[int]) -> None:
    """Round N hands out counts[N] things."""
    released: list[tuple[int, int]] = []
    deferred: DeferredRelease[tuple[int, int]] = DeferredRelease(released.append)
    for number, count in enumerate([*counts, 0, 0]):
        deferred.next_round()
        expected = [(n, i) for n in range(number - 1) for i in range(([*counts, 0, 0])[n])]
        assert released == expected  # all of rounds up to N - 2, nothing of N - 1
        for item in range(count):
            deferred.defer((number, item))
    assert len(deferred) == 0


def test_debug_mode_catches_a_read_that_comes_too_late() -> None:
    free: list[Output] = []
    deferred: DeferredRelease[Output] = DeferredRelease(free.append, debug=True)
    output = Output([1, 2])
    deferred.next_round()
    deferred.defer(output)
    deferred.next_round()
    assert output.tokens == [1, 2]  # the extra round
    deferred.next_round()
    with pytest.raises(StaleReadError, match="Output was read after its round"):
        output.tokens  # noqa: B018
    with pytest.raises(StaleReadError):
        output.tokens = [3]
    again = free.pop()
    revive(again)
    assert again is output and output.tokens == [1, 2]
    revive(output)  # alive already


def test_without_debug_a_late_read_sees_the_object() -> None:
    free: list[Output] = []
    deferred: DeferredRelease[Output] = DeferredRelease(free.append)
    output = Output([1])
    deferred.defer(output)
    deferred.next_round()
    deferred.next_round()
    assert free == [output] and output.tokens == [1]


def test_retiring_twice_needs_one_revival() -> None:
    output = Output([1])
    retire(output)
    retire(output)
    revive(output)
    assert output.tokens == [1]
