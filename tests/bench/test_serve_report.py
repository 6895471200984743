"""Figures from hand-made samples: against arithmetic done by hand, numpy and the standard library."""

import json
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.bench.serve_client import Load, Sample
from deepinfer.bench.serve_report import (
    errors_by_kind,
    meets,
    parse_goodput,
    parse_percentiles,
    peak_concurrency,
    peak_output_throughput,
    statistics_ms,
    summarize,
    table,
    warnings,
)


def sample(started: float, chunk_times: list[float], tokens: int | None, **more) -> Sample:  # type: ignore[no-untyped-def]
    values = {"e2e": chunk_times[-1], "prompt_tokens": 10, "finish_reason": "length"} | more
    return Sample(started=started, chunk_times=chunk_times, output_tokens=tokens, **values)


HAND_MADE = [
    sample(0.0, [0.5, 0.75, 1.0, 1.5], 4),  # TTFT 500, ITL 250 250 500, TPOT 1000 / 3
    sample(1.0, [0.25, 0.5], 5, cached_tokens=8),  # two chunks of 5 tokens: ITL 250, TPOT 250 / 4
    sample(1.25, [1.0], 1),  # one token: no TPOT, no ITL
    Sample(started=1.5, e2e=2.5, error="HTTP 429", message="slow down"),
]


def test_figures_of_hand_made_samples() -> None:
    summary = summarize(Load(HAND_MADE, [0.001, 0.003]), {"ttft": 500, "tpot": 100}, (50, 90, 99))
    assert summary["duration"] == 4.0  # the failed request is the last to end
    assert (summary["completed"], summary["failed"], summary["requests_without_usage"]) == (3, 1, 0)
    assert [summary[f"total_{kind}_tokens"] for kind in ("input", "cached", "output")] == [30, 8, 10]
    assert summary["request_throughput"] == 3 / 4
    assert summary["output_throughput"] == 10 / 4 and summary["total_token_throughput"] == 40 / 4
    assert summary["request_goodput"] == 1 / 4  # the first misses TPOT, the third TTFT
    assert summary["max_concurrent_requests"] == 3
    assert summary["mean_concurrent_requests"] == pytest.approx((1.5 + 0.5 + 1.0 + 2.5) / 4)
    assert summary["mean_ttft_ms"] == pytest.approx((500 + 250 + 1000) / 3)
    assert summary["median_ttft_ms"] == summary["p50_ttft_ms"] == pytest.approx(500)
    assert summary["p90_ttft_ms"] == pytest.approx(500 + 0.8 * 500)
    assert summary["mean_tpot_ms"] == pytest.approx((1000 / 3 + 250 / 4) / 2)
    assert summary["median_itl_ms"] == pytest.approx(250) and summary["mean_itl_ms"] == pytest.approx(312.5)
    assert summary["std_itl_ms"] == pytest.approx(statistics.pstdev([250, 250, 500, 250]))
    assert summary["mean_e2el_ms"] == pytest.approx(1000)
    assert summary["errors"] == {"HTTP 429": {"count": 1, "first": "slow down"}}
    assert summary["mean_client_loop_lag_ms"] == pytest.approx(2) and summary["p100_client_loop_lag_ms"] == 3


@given(st.lists(st.floats(0, 100), min_size=2, max_size=50))
def test_percentiles_are_those_of_numpy_and_of_the_standard_library(seconds: list[float]) -> None:
    found = statistics_ms("x", seconds, (1, 25, 90, 99))
    cuts = statistics.quantiles([value * 1e3 for value in seconds], n=100, method="inclusive")
    for percentile in (1, 25, 90, 99):
        assert found[f"p{percentile}_x_ms"] == pytest.approx(cuts[percentile - 1], abs=1e-6)
        assert found[f"p{percentile}_x_ms"] == pytest.approx(np.percentile(np.array(seconds) * 1e3, percentile))
    assert found["std_x_ms"] == pytest.approx(statistics.pstdev(seconds) * 1e3, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), max_size=30))
def test_peak_concurrency(spans: list[tuple[int, int]]) -> None:
    samples = [Sample(started=float(start), e2e=float(length)) for start, length in spans]
    alive = [sum(start <= moment < start + length for start, length in spans) for moment in range(31)]
    assert peak_concurrency(samples) == max(alive)


def test_peak_output_throughput_counts_tokens_not_chunks() -> None:
    assert peak_output_throughput([]) == 0
    one = sample(0.5, [0.1, 0.2, 0.6, 1.2], 8)  # chunks at 0.6, 0.7, 1.1, 1.7: 4 tokens in each of the seconds 0 and 1
    two = sample(1.0, [0.5], 3)
    assert peak_output_throughput([one, two]) == 4 + 3


def test_an_answer_without_usage_counts_as_a_request_but_not_as_tokens() -> None:
    summary = summarize(Load([sample(0, [0.5, 1.0], None), sample(0, [0.5, 1.0], 3)], []), {}, (99,))
    assert summary["completed"] == 2 and summary["total_output_tokens"] == 3 and summary["total_input_tokens"] == 10
    assert summary["request_goodput"] is None
    assert any("no usage" in line for line in warnings(summary))


def test_goodput_limits() -> None:
    assert parse_goodput([]) == {}
    assert parse_goodput(["ttft:500", "tpot:50,e2el:1e4"]) == {"ttft": 500, "tpot": 50, "e2el": 10000}
    for bad in ("ttft", "itl:5", "ttft:x", "ttft:-1", "ttft:nan"):
        with pytest.raises(ValueError, match="--goodput"):
            parse_goodput([bad])
    one = sample(0, [0.5, 1.0], 2)
    assert meets(one, {"ttft": 500, "tpot": 500, "e2el": 1000})
    assert not meets(one, {"ttft": 499}) and not meets(one, {"tpot": 499}) and not meets(one, {"e2el": 999})
    assert meets(sample(0, [0.5], 1), {"tpot": 1})
    assert not meets(Sample(e2e=0.1, output_tokens=0), {"ttft": 500})


def test_percentile_list() -> None:
    assert parse_percentiles("50, 99.9") == [50, 99.9]
    for bad in ("x", "101", "-1", "nan"):
        with pytest.raises(ValueError, match="--metric-percentiles"):
            parse_percentiles(bad)


def test_errors_keep_the_first_message_of_each_kind() -> None:
    failed = [Sample(error=kind, message=text) for kind, text in [("a", "1"), ("b", "2"), ("a", "3")]]
    assert errors_by_kind(failed) == {"a": {"count": 2, "first": "1"}, "b": {"count": 1, "first": "2"}}


def test_the_table_has_the_lines_of_vllm() -> None:
    summary = summarize(Load(HAND_MADE, [0.0]), {"ttft": 500}, (90, 99))
    lines = table(summary | {"max_concurrency": 8, "request_rate": "inf"}, (90, 99))
    assert lines[0] == "============ Serving Benchmark Result ============" and lines[-1] == "=" * 50
    values = {label: value.strip() for label, _, value in (line.partition(":") for line in lines)}
    assert values["Successful requests"] == "3" and values["Failed requests"] == "1"
    assert values["Request throughput (req/s)"] == "0.75" and values["Request goodput (req/s)"] == "0.50"
    assert values["Output token throughput (tok/s)"] == "2.50" and values["Total token throughput (tok/s)"] == "10.00"
    for name in ("TTFT", "TPOT", "ITL", "E2EL"):
        assert {f"{kind} {name} (ms)" for kind in ("Mean", "Median", "Std", "P90", "P99")} <= set(values)
    assert values["Median TTFT (ms)"] == "500.00" and values["Mean E2EL (ms)"] == "1000.00"
    assert values["HTTP 429"] == "1" and values["  first"] == "slow down"


def test_a_run_of_failures_alone_has_a_report_without_latencies() -> None:
    summary = summarize(Load([Sample(error="timeout", e2e=1.0)], []), {}, (99,)) | {"max_concurrency": None}
    assert summary["completed"] == 0 and summary["mean_ttft_ms"] is None and summary["output_throughput"] == 0
    assert any("Mean TTFT" in line and "n/a" in line for line in table(summary | {"request_rate": 1.0}, (99,)))
    json.dumps(summary, allow_nan=False)


def test_a_late_client_is_warned_of() -> None:
    prompt_run = summarize(Load(HAND_MADE, [0.001] * 100), {}, (99,))
    assert warnings(prompt_run) == []
    assert "overloaded" in warnings(summarize(Load(HAND_MADE, [0.001] * 90 + [0.2] * 10), {}, (99,)))[0]
