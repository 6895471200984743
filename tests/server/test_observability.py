"""Statistics in the log and in /metrics, and traces, of a whole server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deepinfer.observability.stats import StatsLogger, StepStats
from deepinfer.server.metrics import Metrics
from tests.server.process import MODEL, Server, start_server


@pytest.fixture(scope="module")
def watched(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    patch = pytest.MonkeyPatch()
    patch.setenv("DEEPINFER_STATS_INTERVAL", "0.2")
    patch.setenv("DEEPINFER_TIMERS", "1")
    patch.setenv("DEEPINFER_PEAK_FLOPS", "1e12")
    patch.setenv("DEEPINFER_PROFILER_DIR", str(tmp_path_factory.mktemp("traces")))
    running = start_server(checkpoint, "--served-model-name", MODEL, "--profiler-port", "0")
    patch.undo()
    yield running
    running.process.terminate()
    running.process.wait(timeout=30)


def generate(server: Server, tokens: int) -> None:
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200


def find_in_log(server: Server, pattern: str) -> re.Match[str]:
    deadline = time.monotonic() + 20
    while True:
        match = re.search(pattern, "".join(server.log))
        if match:
            return match
        assert time.monotonic() < deadline, f"no {pattern!r} in:\n{''.join(server.log)}"
        time.sleep(0.05)


def test_statistics_in_the_log_and_in_the_metrics(watched: Server) -> None:
    generate(watched, 300)
    line = find_in_log(watched, r"generation ([\d.]+) tok/s, running (\d+), waiting 0, KV cache .*MFU ([\d.]+)%")
    assert float(line[1]) > 0 and line[2] == "1"
    find_in_log(watched, r"medians in ms: schedule [\d.]+, inputs [\d.]+, forward [\d.]+, sample [\d.]+")
    assert watched.metric("deepinfer:avg_generation_throughput_toks_per_s", model_name=MODEL) > 0
    assert watched.metric("deepinfer:avg_prompt_throughput_toks_per_s") > 0
    flops = watched.metric("deepinfer:estimated_flops_per_gpu_total", model_name=MODEL)
    # About two operations a parameter and token; the tiny model uses some 2 of its 3.4 million for each.
    assert 300 * 1e6 < flops < 300 * 20e6
    assert 0 < watched.metric("deepinfer:mfu") < 1
    text = httpx.get(f"{watched.url}/metrics").text
    assert not any(name in text for name in ("prefix_cache", "spec_decode"))  # no such features yet
    balance = watched.metric("deepinfer:moe_expert_balance", model_name=MODEL)
    assert 1 <= balance <= 8  # experts of the tiny model


def test_a_trace_of_the_server(watched: Server) -> None:
    profiler = find_in_log(watched, r"profiler at (http://127\.0\.0\.1:\d+)")[1]
    assert httpx.post(f"{profiler}/start_profile?steps=4").status_code == 200
    generate(watched, 10)
    deadline = time.monotonic() + 20
    while (status := httpx.get(f"{profiler}/status").json())["state"] != "idle":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    events = json.loads(Path(status["latest"]).read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::embedding" for event in events) >= 4


def test_counters_of_features_appear_once_they_are_used() -> None:
    metrics, statistics = Metrics("m"), StatsLogger(interval=0)
    step = {"num_prompt_tokens": 0, "num_output_tokens": 4, "num_running": 1, "num_waiting": 0}
    for _ in range(2):
        statistics.record(
            StepStats(
                **step,
                cache_usage=0.0,
                num_preemptions=0,
                prefix_queries=100,
                prefix_hits=25,
                drafts=2,
                accepted_tokens=6,
                draft_tokens=10,
                accepted_at=[2, 2, 1, 1, 0],
            )  # fmt: skip
        )
        metrics.update(statistics)
        metrics.update(statistics)  # reading twice counts nothing twice
    text = metrics.render().decode()
    for name, value in (
        ("prefix_cache_queries", 200), ("prefix_cache_hits", 50), ("spec_decode_num_drafts", 4),
        ("spec_decode_num_accepted_tokens", 12),
    ):  # fmt: skip
        assert f'deepinfer:{name}_total{{engine="0",model_name="m"}} {value}.0\n' in text
    for prefix in ("deepinfer", "vllm"):
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        by_position = rf'^{prefix}:{name}{{engine="0",model_name="m",position="(.)"}} (.*)$'
        found = re.findall(by_position, text, re.MULTILINE)
        assert found == [("0", "4.0"), ("1", "4.0"), ("2", "2.0"), ("3", "2.0"), ("4", "0.0")]
    assert 'sglang:spec_accept_length{engine="0",model_name="m"} 4.0\n' in text
    assert 'sglang:spec_accept_rate{engine="0",model_name="m"} 0.6\n' in text
    assert "estimated_flops" not in text and "mfu" not in text
