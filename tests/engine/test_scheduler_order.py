"""Priorities with aging, the choice of a victim, and deadlines."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.deadlines import Deadlines
from deepinfer.engine.order import SECONDS_PER_LEVEL, queue_order, victim_of
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Sequence
from deepinfer.outputs import RequestMetrics
from deepinfer.params import SamplingParams
from tests.engine.test_engine_workloads import assert_idle, make_engine

arrivals = itertools.count()


def make_sequence(priority: int = 0, arrival_time: float = 0.0, length: int = 4, num_output: int = 0) -> Sequence:
    params = SamplingParams(temperature=0, ignore_eos=True, priority=priority)
    seq = Sequence(str(next(arrivals)), 0, next(arrivals), [1] * length, params, 0, RequestMetrics(arrival_time))
    seq.token_ids.extend([1] * num_output)
    return seq


def make_scheduler(num_blocks: int, **options: object) -> Scheduler:
    return Scheduler(EngineConfig(**{"block_size": 4, "max_num_seqs": 2, **options}), num_blocks)


def step(scheduler: Scheduler, max_tokens: int = 10_000) -> list[Sequence]:
    """Schedule, pretend to run, and return what finished with max_tokens output tokens."""
    batch = scheduler.schedule()
    assert batch is not None
    sampled = batch.sampled
    scheduler.advance(batch)
    for seq in sampled:
        seq.append(1, ())
    finished = [seq for seq in sampled if seq.num_output_tokens >= max_tokens]
    scheduler.remove(finished)
    scheduler.check_integrity()
    return finished


def test_a_lower_priority_is_admitted_first_then_the_older() -> None:
    scheduler = make_scheduler(100, max_num_seqs=1)
    last, first, second = make_sequence(1), make_sequence(-1), make_sequence(0)
    third = make_sequence(0)
    for seq in (last, first, second, third):
        scheduler.add(seq)
    order = []
    while scheduler.has_unfinished():
        order += step(scheduler, max_tokens=2)
    assert order == [first, second, third, last]


def test_a_level_is_worth_a_minute_of_waiting() -> None:
    urgent = make_sequence(-1, arrival_time=100.0)
    just_before, just_after = (make_sequence(0, 100.0 - SECONDS_PER_LEVEL + shift) for shift in (-0.1, 0.1))
    assert sorted([just_after, urgent, just_before], key=lambda s: s.order) == [just_before, urgent, just_after]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(-9, 9)), min_size=2, max_size=8))
def test_nobody_is_overtaken_by_those_that_come_long_after(requests: list[tuple[float, int]]) -> None:
    keys = [queue_order(when, priority, number) for number, (when, priority) in enumerate(requests)]
    for (a_time, a_level), a in zip(requests, keys, strict=True):
        for (b_time, b_level), b in zip(requests, keys, strict=True):
            if b_time > a_time + SECONDS_PER_LEVEL * max(0, a_level - b_level) + 1e-3:
                assert a < b


def test_the_victim_has_the_worst_priority_then_the_shortest_output_then_the_latest_arrival() -> None:
    patient = make_sequence(2, num_output=50)
    short, long = make_sequence(1, num_output=1), make_sequence(1, num_output=9)
    twin = make_sequence(1, num_output=1)
    urgent = make_sequence(-5)
    pool = [urgent, long, short, patient, twin]
    taken = []
    while pool:
        taken.append(victim_of(pool))
        pool.remove(taken[-1])
    assert taken == [patient, twin, short, long, urgent]


def test_preemption_spares_the_better_priority() -> None:
    scheduler = make_scheduler(9, watermark=0.0)  # 8 blocks for two sequences that grow to 7 each
    patient, urgent = make_sequence(0, num_output=20), make_sequence(-1)
    scheduler.add(patient)
    step(scheduler)
    scheduler.add(urgent)
    while not scheduler.num_preemptions:
        step(scheduler)
    assert patient.metrics.num_preemptions == 1 and urgent.metrics.num_preemptions == 0


@settings(max_examples=25, deadline=None)
@given(
    levels=st.integers(1, 3),
    seconds_per_step=st.sampled_from([6.0, 20.0]),
    burst=st.integers(1, 3),
    length=st.integers(1, 24),
    max_tokens=st.integers(1, 12),
    num_blocks=st.integers(11, 24),  # one sequence takes 9 at most
)
def test_an_endless_stream_of_better_requests_starves_nobody(
    levels: int, seconds_per_step: float, burst: int, length: int, max_tokens: int, num_blocks: int
) -> None:
    """Also when more arrive than can be served, the patient one only waits for those of its first minutes."""
    scheduler = make_scheduler(num_blocks, max_num_seqs=2)
    patient = make_sequence(levels, arrival_time=0.0, length=24)
    scheduler.add(patient)
    # Up to one level more: equals may be served, and spared by preemption, before it.
    num_better = burst * (1 + int((levels + 1) * SECONDS_PER_LEVEL / seconds_per_step))
    num_steps = 0
    finished: list[Sequence] = []
    while patient not in finished:
        for _ in range(burst):
            scheduler.add(make_sequence(0, arrival_time=num_steps * seconds_per_step, length=length))
        finished += step(scheduler, max_tokens)
        num_steps += 1
        assert num_steps <= 2 * (num_better + 1) * (max_tokens + 1) + 10, "it starves"
    assert len(finished) <= num_better + 2


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 100)), max_size=20), st.lists(st.floats(0, 120), max_size=6))
def test_deadlines_expire_once_and_in_order(adds: list[tuple[int, float]], times: list[float]) -> None:
    deadlines = Deadlines()
    due = {str(name): when for name, when in adds}
    for name, when in due.items():
        deadlines.add(name, when)
    for now in sorted(times):
        expired = deadlines.expired(now)
        assert expired == [name for when, name in sorted((when, name) for name, when in due.items() if when <= now)]
        for name in expired:
            deadlines.remove(name)
            del due[name]
        assert len(deadlines) == len(due)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_request_past_its_deadline_is_gone_within_a_step(overlap: bool, waits: bool) -> None:
    engine = make_engine(4, 20, 1, 16, 64, zero_overhead_scheduling=overlap)
    endless = SamplingParams(temperature=0, ignore_eos=True)
    if waits:  # behind another, so that it never holds anything
        engine.add_request("other", [5], endless)
    engine.add_request("late", [1, 2, 3], SamplingParams(temperature=0, ignore_eos=True, n=2, deadline_seconds=0.05))
    outputs = [output for _ in range(4) for output in engine.step()]  # of which one ends it on a slow machine
    time.sleep(0.06)
    outputs += engine.step()
    (late,) = (output for output in outputs if output.request_id == "late" and output.finished)
    ends = [(c.finish_reason, c.stop_reason) for c in late.outputs]
    assert ends == [("abort", "deadline")] * 2
    assert "late" not in engine.requests
    assert all(seq.request_id != "late" for seq in (*engine.scheduler.running, *engine.scheduler.waiting))
    engine.scheduler.check_integrity()
    engine.abort_request("other")
    engine.step()
    assert_idle(engine)


def test_a_request_in_time_is_not_touched() -> None:
    engine = make_engine(4, 20, 2, 16, 64)
    engine.add_request("a", [1], SamplingParams(temperature=0, ignore_eos=True, max_tokens=3, deadline_seconds=1000.0))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].finish_reason == "length" and len(engine._book._deadlines) == 0
