"""Sliding windows against sums over all events, and what the log line says."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.observability.observer import Observer
from deepinfer.observability.peak import PEAK_FLOPS, measured_cpu_flops, peak_flops
from deepinfer.observability.stats import BUCKETS, SlidingSum, StatsLogger, StepStats, line, moe_balance


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(-5, 5)), max_size=60), st.floats(0, 20))
def test_sliding_sum_forgets_exactly_what_left_the_window(events: list[tuple[float, int]], wait: float) -> None:
    window = 10.0
    sliding, now, seen = SlidingSum(window), 1000.0, []
    for gap, value in events:
        now += gap
        sliding.add(value, now)
        seen.append((now, value))
    now += wait
    width = window / BUCKETS
    kept = [value for at, value in seen if int(at / width) > int(now / width) - BUCKETS]
    assert sliding.sum(now) == sum(kept) and sliding.count(now) == len(kept)
    # The window is right to within one bucket.
    assert {v for at, v in seen if now - at < window - width} <= set(kept)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(**fields: object) -> StepStats:
    values: dict = {
        "num_prompt_tokens": 0, "num_output_tokens": 0, "num_running": 0, "num_waiting": 0, "cache_usage": 0.0,
        "num_preemptions": 0,
    }  # fmt: skip
    return StepStats(**{**values, **fields})


def test_rates_of_a_steady_load_and_after_it() -> None:
    clock = Clock()
    stats = StatsLogger(interval=0, window=10, peak_flops=lambda: 1000.0, clock=clock)
    for number in range(400):  # 20 s of 20 steps a second
        clock.now += 0.05
        stats.record(
            step(
                num_prompt_tokens=8,
                num_output_tokens=3,
                num_running=7,
                num_waiting=2,
                cache_usage=0.25,
                num_preemptions=number // 100,
                flops=5.0,
                prefix_queries=10,
                prefix_hits=4,
                drafts=2,
                accepted_tokens=5,
                draft_tokens=8,
                accepted_at=[2, 2, 1, 0],
                expert_counts=np.array([[4, 0, 0, 0], [1, 1, 1, 1]]),
            )
        )
    now = stats.window()
    tolerance = {"rel": 1.5 / BUCKETS}
    assert now.prompt_throughput == pytest.approx(160, **tolerance)
    assert now.generation_throughput == pytest.approx(60, **tolerance)
    assert now.steps_per_second == pytest.approx(20, **tolerance)
    assert now.mfu == pytest.approx(0.1, **tolerance)
    assert (now.num_running, now.num_waiting, now.cache_usage, now.num_preemptions) == (7, 2, 0.25, 2)
    assert now.prefix_hit_rate == pytest.approx(0.4)
    assert now.accepted_length == pytest.approx(3.5)  # the target's own token included
    assert now.acceptance_rates == pytest.approx((1, 1, 0.5, 0)) and now.acceptance_rate == pytest.approx(5 / 8)
    assert "accepted length 3.50, accepted by position 1.00 1.00 0.50 0.00" in line(now)
    assert now.moe_balance == pytest.approx((4 + 1) / 2)
    assert stats.totals["output"] == 1200 and stats.totals["flops"] == 2000
    clock.now += 60
    later = stats.window()
    assert later.prompt_throughput == later.generation_throughput == later.steps_per_second == 0
    assert later.acceptance_rates == () and "accepted" not in line(later)
    assert later.prefix_hit_rate is None and later.accepted_length is None and later.moe_balance is None


def test_before_the_window_is_full_rates_are_over_the_time_there_was() -> None:
    clock = Clock()
    stats = StatsLogger(interval=0, window=10, clock=clock)
    clock.now += 2
    stats.record(step(num_output_tokens=50))
    assert stats.window().generation_throughput == pytest.approx(25)


def test_features_that_do_not_exist_are_none_and_not_in_the_line() -> None:
    stats = StatsLogger(interval=0, clock=Clock())
    stats.record(step(num_output_tokens=1))
    now = stats.window()
    assert now.prefix_hit_rate is now.accepted_length is now.moe_balance is now.mfu is None
    assert not any(word in line(now) for word in ("prefix", "accepted", "MoE", "MFU"))


def test_one_line_every_interval(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    stats = StatsLogger(interval=5, clock=clock)
    with caplog.at_level(logging.INFO, logger="deepinfer.stats"):
        for _ in range(120):
            clock.now += 0.1
            stats.record(step(num_prompt_tokens=10, num_running=3, cache_usage=0.5))
    assert len(caplog.messages) == 2
    assert "running 3" in caplog.messages[0] and "KV cache 50.0%" in caplog.messages[0]
    assert float(caplog.messages[1].split("prompt ")[1].split()[0]) == pytest.approx(100, rel=0.1)


def test_after_a_pause_a_line_waits_for_an_interval_of_work(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    stats = StatsLogger(interval=5, window=5, clock=clock)
    stats.record(step(num_prompt_tokens=10))
    clock.now += 60
    with caplog.at_level(logging.INFO, logger="deepinfer.stats"):
        stats.record(step(num_prompt_tokens=10, num_running=1))
        assert not caplog.messages
        for _ in range(60):
            clock.now += 0.1
            stats.record(step(num_output_tokens=1, num_running=1))
    assert len(caplog.messages) == 1
    assert float(caplog.messages[0].split("generation ")[1].split()[0]) == pytest.approx(10, rel=0.1)


def test_memory_does_not_grow_with_steps() -> None:
    stats = StatsLogger(interval=0)
    import tracemalloc

    tracemalloc.start()
    for number in range(4000):
        if number == 2000:
            before = tracemalloc.get_traced_memory()[0]
        stats.record(step(num_output_tokens=5, flops=1.0))
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 2000


def test_moe_balance() -> None:
    assert moe_balance(np.array([[5, 5, 5, 5]])) == 1
    assert moe_balance(np.array([[8, 0, 0, 0], [0, 0, 0, 0]])) == 4  # layers that did not run say nothing
    assert moe_balance(np.zeros((2, 4), int)) == 1


def test_peak_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPINFER_PEAK_FLOPS", raising=False)
    assert peak_flops("cuda:0", "NVIDIA H200") == peak_flops("cuda", "NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("cuda", "NVIDIA H20") == 148e12 and peak_flops("cuda", "NVIDIA A10") == 125e12
    assert peak_flops("cuda", "NVIDIA L4") == 121e12 and peak_flops("cuda", "NVIDIA L40S") == 362e12
    assert peak_flops("cuda", "An unknown card") is None
    assert 1e8 < measured_cpu_flops(128) < 1e14
    monkeypatch.setenv("DEEPINFER_PEAK_FLOPS", "2.5e12")
    assert peak_flops("cuda", "NVIDIA H200") == peak_flops("cpu") == 2.5e12


@pytest.mark.parametrize("number", range(len(PEAK_FLOPS)))
def test_no_entry_of_the_table_hides_a_later_one(number: int) -> None:
    name, flops = PEAK_FLOPS[number]
    assert peak_flops("cuda", f"NVIDIA {name}") == flops


def test_a_peak_that_is_no_number_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_PEAK_FLOPS", "fast")
    with pytest.raises(ValueError, match="DEEPINFER_PEAK_FLOPS='fast': must be a number > 0"):
        Observer("cpu")
