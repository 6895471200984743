"""Nothing grows with the number of steps, and the benchmark of the host's part of a step measures what it says."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from deepinfer.bench import host_overhead, results
from deepinfer.bench.host_overhead import MemorySample, growth, steady_load, step_cost
from deepinfer.params import SamplingParams


def assert_flat(samples: list[MemorySample], resident_limit: int) -> None:
    traced, resident = growth(samples)
    assert traced < 64 << 10, f"Python memory grew by {traced} bytes: {[s.traced_bytes for s in samples]}"
    assert resident < resident_limit, f"resident memory grew: {[s.resident_bytes for s in samples]}"


@pytest.mark.parametrize("overlapped", [False, True])
def test_no_allocation_grows_over_a_short_run(overlapped: bool) -> None:
    """The same as the long test; a leak of 40 bytes a step would show."""
    samples = steady_load(num_seqs=20, num_steps=3000, num_samples=20, overlapped=overlapped)
    assert_flat(samples, resident_limit=8 << 20)  # a table of tracemalloc's grows once, by 4 MiB
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_allocation_grows_over_100_000_steps() -> None:
    samples = steady_load(num_seqs=60, num_steps=100_000, num_samples=40, overlapped=True)
    assert_flat(samples, resident_limit=4 << 20)


def test_growth_sees_a_leak() -> None:
    leaking = [MemorySample(step, 10_000_000 + 100 * step, 0) for step in range(0, 40_000, 1000)]
    assert growth(leaking)[0] == 2_000_000
    with pytest.raises(AssertionError, match="grew"):
        assert_flat(leaking, 1 << 20)


def test_step_cost_times_every_part() -> None:
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    cost = step_cost(num_seqs=8, num_steps=30, params=params, vocab_size=64)
    assert all(value > 0 for value in cost.parts.values()) and cost.parts.keys() == {*host_overhead.PARTS, "sample"}
    # 60 sequences take a fraction of this; the bound holds on a machine that does much else.
    assert cost.host == pytest.approx(sum(cost.parts[name] for name in host_overhead.PARTS)) and cost.host < 20


def test_a_step_with_drafts_verifies_so_many() -> None:
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    engine = host_overhead.make_engine(4, 64, 512, num_drafts=3)
    for number in range(4):
        engine.add_request(str(number), [5] * 20, params)
    while engine.num_output_tokens < 200:
        engine.step()
    totals = engine.observer.stats.totals
    assert totals["draft_tokens"] == 3 * totals["drafts"] > 3 * 4
    assert step_cost(num_seqs=4, num_steps=30, params=params, vocab_size=64, num_drafts=3).host < 20


def test_records_are_written(tmp_path: Path) -> None:

    records = host_overhead.measure(num_seqs=4, num_steps=20, repeats=1, growth_steps=200, command="c")
    path = results.save("host_overhead", records, tmp_path)
    saved = json.loads(path.read_text())
    assert len(saved) == 10 and {record["part"] for record in saved} == {"2"}
    first = next(record for record in saved if record["name"].startswith("decode step"))
    assert first["target"] == 1.0 and not first["higher_is_better"] and first["value"] == first["samples"][0]
