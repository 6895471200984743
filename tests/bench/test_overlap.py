"""Idle shares against a count of microseconds, and the benchmark of overlapped scheduling end to end on a CPU."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.bench import overlap
from deepinfer.bench.decode import decode
from deepinfer.bench.synthetic import benchmark_model
from deepinfer.bench.timeline import Interval, Timeline, draw, read_trace

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12)


@given(INTERVALS, st.integers(0, 40), st.integers(1, 40))
def test_idle_share_counts_every_microsecond_once(intervals: list[tuple[int, int]], start: int, length: int) -> None:
    timeline = Timeline(device=[Interval("k", first, first + size) for first, size in sorted(intervals)])
    busy = {tick for first, size in intervals for tick in range(first, first + size)}
    idle = sum(tick not in busy for tick in range(start, start + length))
    assert timeline.idle_share(start, start + length) == pytest.approx(idle / length)


@given(INTERVALS, st.lists(st.integers(0, 70), min_size=12, max_size=12), st.integers(0, 40), st.integers(1, 40))
def test_drained_is_idle_before_the_next_launch(
    intervals: list[tuple[int, int]], launches: list[int], start: int, length: int
) -> None:
    operations = [
        Interval("k", first, first + size, min(launched, first))
        for (first, size), launched in zip(sorted(intervals), launches, strict=False)
    ]
    busy = {tick for operation in operations for tick in range(int(operation.start), int(operation.end))}
    drained = 0
    for tick in range(start, start + length):
        coming = next((operation for operation in operations if operation.start > tick), None)
        drained += tick not in busy and coming is not None and coming.launched > tick
    assert Timeline(device=operations).drained_share(start, start + length) == pytest.approx(drained / length)


def chrome_trace(path: Path) -> Path:
    """What torch.profiler writes: scopes, operators, kernels and their ranges on the device."""
    events = []
    for step in range(8):
        at = 100.0 * step
        events += [
            {"ph": "X", "cat": "user_annotation", "name": "engine: schedule", "ts": at, "dur": 10, "tid": 1},
            {"ph": "X", "cat": "user_annotation", "name": "engine: forward", "ts": at + 10, "dur": 30, "tid": 1},
            {"ph": "X", "cat": "user_annotation", "name": "Optimizer.step", "ts": at, "dur": 99, "tid": 1},
            {"ph": "X", "cat": "gpu_user_annotation", "name": "engine: forward", "ts": at, "dur": 99, "tid": 7},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": at, "dur": 99, "tid": 1},
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": at + 11,
                "dur": 4,
                "tid": 1,
                "args": {"correlation": 2 * step},
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": "gemm",
                "ts": at + 20,
                "dur": 60,
                "tid": 7,
                "args": {"correlation": 2 * step},
            },
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": at + 60, "dur": 30, "tid": 8},
            {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "ts": at + 95, "dur": 5, "tid": 7},
            {"ph": "i", "cat": "x", "name": "mark", "ts": at},
        ]
    path.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 1_700_000_000_000_000_123}))
    return path


def test_lanes_of_a_trace_and_of_what_is_saved_of_it(tmp_path: Path) -> None:
    timeline = read_trace(chrome_trace(tmp_path / "trace.json"))
    assert timeline.steps == [100.0 * step for step in range(8)]
    assert len(timeline.host) == 16 and len(timeline.device) == 24
    assert timeline.idle_share(100, 700) == pytest.approx(0.25)
    assert timeline.drained_share(100, 700) == pytest.approx(0.15)  # 20 us idle a step, 15 of them before the launch
    assert timeline.origin == 1_700_000_000_000_000_123
    timeline.save(tmp_path / "small.json.gz")
    assert read_trace(tmp_path / "small.json.gz") == replace(timeline, origin=0)


def test_the_picture_shows_every_lane_on_one_scale(tmp_path: Path) -> None:
    timeline = read_trace(chrome_trace(tmp_path / "trace.json"))
    svg = ElementTree.fromstring(draw({"off": timeline, "on & fast": timeline}, num_steps=2))
    texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("device") == texts.count("schedule") == texts.count("forward") == 2 and "on & fast" in texts
    assert texts[-1] == "0.20 ms"
    widths = [
        float(e.attrib["width"]) for e in svg.iter("{http://www.w3.org/2000/svg}rect") if "%" not in e.attrib["width"]
    ]
    assert max(widths) / min(widths) == pytest.approx(70 / 5, rel=0.05)  # both kernels, a copy


def test_both_engines_decode_the_same_tokens_and_a_trace_has_every_scope(tmp_path: Path) -> None:
    model = benchmark_model("", "cpu", "v41-small", 4)
    load = overlap.Load(batch=3, prompt_len=10, rounds=1, steps=4)
    engines = [overlap.decoding_engine(model, overlapped, load, "cpu") for overlapped in (False, True)]
    assert [engine.overlaps for engine in engines] == [False, True]
    sequences = [engine.scheduler.running for engine in engines]
    assert [len(running) for running in sequences] == [3, 3]
    for engine in engines:
        decode(engine, 3)
    for off, on in zip(*sequences, strict=True):  # a step is in flight
        shared = min(len(off.token_ids), len(on.token_ids))
        assert off.token_ids[:shared] == on.token_ids[:shared] and shared >= 16
    timeline = overlap.trace(engines[1], tmp_path)
    assert len(timeline.steps) == overlap.TRACED_STEPS and not timeline.device
    names = [scope.name for scope in timeline.between(timeline.steps[3], timeline.steps[4]).host]
    assert names == ["schedule", "inputs", "forward", "read", "postprocess", "observe", "sample"]
    assert not isinstance(engines[1].observer.timer, overlap.ScopeRecorder)


def test_a_quick_run_saves_only_traces_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    overlap.main("--quick --synthetic v41-small --layers 4 --batch 2 --traces t --picture p.svg".split())
    assert "x off" in capsys.readouterr().out
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert found == ["p.svg", "t/overlap-off.json.gz", "t/overlap-on.json.gz"]
    assert len(read_trace(tmp_path / "t" / "overlap-on.json.gz").steps) >= 10


def test_a_recorded_command_names_no_files() -> None:
    given = "--device cuda --traces /a/b --steps 5 --picture=/c.svg --quick"
    assert overlap.without_files(given.split()) == ["--device", "cuda", "--steps", "5", "--quick"]


def test_a_failed_step_is_no_measurement() -> None:
    """A step that fails is a fast one."""
    model = benchmark_model("", "cpu", "v41-small", 4)
    load = overlap.Load(batch=2, prompt_len=10, rounds=1, steps=2)
    engine = overlap.decoding_engine(model, False, load, "cpu")
    model.head = model.head[:, 1:]  # shapes no longer fit
    with pytest.raises(ValueError, match="a request failed"):
        decode(engine, 1)
    with pytest.raises(ValueError, match="a request failed"):
        overlap.decoding_engine(model, False, load, "cpu")


def test_wrong_numbers_are_named(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        overlap.main(["--batch", "0"])
    assert "--batch" in capsys.readouterr().err
