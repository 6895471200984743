"""From samples to figures: the summary of a serving benchmark, under the names that vLLM's has, and its table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from deepinfer.bench.serve_client import Load, Sample

# key -> (heading, short name)
LATENCIES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
# What vLLM prints first of each, and SGLang besides: the p95 and the longest of all gaps.
ITL_PERCENTILES = (95, 100)
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
LATE_MS = 10.0  # a client whose timers are later than this 1% of the time cannot measure small gaps
WIDTH = 50


def parse_goodput(terms: Sequence[str]) -> dict[str, float]:
    """["ttft:500", "tpot:50"] or ["ttft:500,tpot:50"] -> limits in ms.  Raises ValueError naming the option."""
    limits = {}
    for term in " ".join(terms).replace(",", " ").split():
        name, _, value = term.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in GOODPUT_METRICS or not limits[name] > 0:
            raise ValueError(f"--goodput must be METRIC:MS with {', '.join(GOODPUT_METRICS)}, got {term!r}")
    return limits


def parse_percentiles(text: str) -> list[float]:
    """`90,99` -> [90.0, 99.0].  Raises ValueError naming the option."""
    try:
        percentiles = [float(part) for part in text.replace(",", " ").split()]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        raise ValueError(f"--metric-percentiles must be numbers from 0 to 100 with commas, got {text!r}")
    return percentiles


def parse_metrics(text: str) -> list[str]:
    """`ttft,tpot` -> ["ttft", "tpot"].  Raises ValueError naming the option."""
    names = text.replace(",", " ").split()
    if not names or not set(names) <= set(LATENCIES):
        raise ValueError(f"--percentile-metrics must be some of {', '.join(LATENCIES)} with commas, got {text!r}")
    return names


def statistics_ms(name: str, seconds: Iterable[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """mean, median, std (of the whole population) and percentiles (linear interpolation); None without samples."""
    values = np.array(list(seconds)) * 1e3
    found: dict[str, Any] = {"mean": np.mean, "median": np.median, "std": np.std}
    found |= {f"p{percentile:g}": lambda v, q=percentile: np.percentile(v, q) for percentile in percentiles}
    return {f"{key}_{name}_ms": float(compute(values)) if len(values) else None for key, compute in found.items()}


def meets(sample: Sample, limits: dict[str, float]) -> bool:
    """Whether each latency is within its limit (ms); an answer of one token has no TPOT and passes that one."""
    measured = {"ttft": sample.ttft, "tpot": sample.tpot or 0.0, "e2el": sample.e2e}
    return all(value is not None and value * 1e3 <= limits[name] for name, value in measured.items() if name in limits)


def peak_concurrency(samples: Sequence[Sample]) -> int:
    """Most requests in flight at the same moment."""
    steps = [(sample.started, 1) for sample in samples] + [(sample.started + sample.e2e, -1) for sample in samples]
    return int(max(np.cumsum([step for _, step in sorted(steps)]), default=0))


def peak_output_throughput(samples: Sequence[Sample]) -> float:
    """Output tokens in the busiest second; a request's tokens are spread evenly over its chunks."""
    times, weights = [0.0], [0.0]
    for sample in samples:
        times += [sample.started + time for time in sample.chunk_times]
        weights += [(sample.output_tokens or 0) / len(sample.chunk_times)] * len(sample.chunk_times)
    return float(np.bincount(np.floor(times).astype(int), weights).max())


def errors_by_kind(samples: Iterable[Sample]) -> dict[str, dict[str, Any]]:
    """kind -> {"count", "first": the first message of that kind}."""
    kinds: dict[str, dict[str, Any]] = {}
    for sample in samples:
        if sample.error:
            kinds.setdefault(sample.error, {"count": 0, "first": sample.message})["count"] += 1
    return kinds


def summarize(load: Load, limits: dict[str, float], percentiles: Sequence[float]) -> dict[str, Any]:
    """The figures of a run.  Rates are per second of the whole run, latencies are of successful requests."""
    good = [sample for sample in load.samples if not sample.error]
    counted = [sample for sample in good if sample.output_tokens is not None]
    duration = max((sample.started + sample.e2e for sample in load.samples), default=0.0)
    per_second = 1 / duration if duration else 0.0
    input_tokens = sum(sample.prompt_tokens or 0 for sample in counted)
    output_tokens = sum(sample.output_tokens or 0 for sample in counted)
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(load.samples) - len(good),
        "total_input_tokens": input_tokens,
        "total_cached_tokens": sum(sample.cached_tokens for sample in counted),
        "total_output_tokens": output_tokens,
        "requests_without_usage": len(good) - len(counted),
        "request_throughput": len(good) * per_second,
        "request_goodput": sum(meets(sample, limits) for sample in good) * per_second if limits else None,
        "output_throughput": output_tokens * per_second,
        "max_output_tokens_per_s": peak_output_throughput(counted),
        "total_token_throughput": (input_tokens + output_tokens) * per_second,
        "max_concurrent_requests": peak_concurrency(load.samples),
        "mean_concurrent_requests": sum(sample.e2e for sample in load.samples) * per_second,
    }
    latencies: dict[str, list[float]] = {
        "ttft": [sample.ttft for sample in good if sample.ttft is not None],
        "tpot": [sample.tpot for sample in good if sample.tpot is not None],
        "itl": [gap for sample in good for gap in sample.itl],
        "e2el": [sample.e2e for sample in good],
    }
    for name, seconds in latencies.items():
        more = ITL_PERCENTILES if name == "itl" else ()
        summary |= statistics_ms(name, seconds, sorted({*percentiles, *more}))
    summary |= statistics_ms("client_queue_time", [sample.queued for sample in load.samples], percentiles)
    summary |= statistics_ms("client_send_lag", [sample.lag for sample in load.samples], (99, 100))
    summary |= statistics_ms("client_loop_lag", load.loop_lags, (99, 100))
    return summary | {"errors": errors_by_kind(load.samples)}


def detailed(load: Load) -> dict[str, list[Any]]:
    """vLLM's lists of a detailed result, one entry a request; times in seconds."""
    return {
        "input_lens": [sample.prompt_tokens or 0 for sample in load.samples],
        "output_lens": [sample.output_tokens or 0 for sample in load.samples],
        "ttfts": [sample.ttft or 0.0 for sample in load.samples],
        "itls": [sample.itl for sample in load.samples],
        "start_times": [sample.started for sample in load.samples],
        "request_errors": [sample.message if sample.error else "" for sample in load.samples],
    }


def _line(label: str, value: Any) -> str:
    if isinstance(value, float):
        value = f"{value:.2f}"
    return f"{label:<40} {'n/a' if value is None else value!s:<9}"


def table(
    summary: dict[str, Any], percentiles: Sequence[float], metrics: Sequence[str] = tuple(LATENCIES)
) -> list[str]:
    """Lines of the report, laid out as vLLM's.  `summary` also holds the settings of the run."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [
        _line(label, summary[key])
        for label, key in (
            ("Successful requests:", "completed"),
            ("Failed requests:", "failed"),
            ("Maximum request concurrency:", "max_concurrency"),
            ("Request rate configured (RPS):", "request_rate"),
            ("Benchmark duration (s):", "duration"),
            ("Total input tokens:", "total_input_tokens"),
            ("Total cached input tokens:", "total_cached_tokens"),
            ("Total generated tokens:", "total_output_tokens"),
            ("Request throughput (req/s):", "request_throughput"),
            ("Request goodput (req/s):", "request_goodput"),
            ("Output token throughput (tok/s):", "output_throughput"),
            ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
            ("Peak concurrent requests:", "max_concurrent_requests"),
            ("Mean concurrent requests:", "mean_concurrent_requests"),
            ("Total token throughput (tok/s):", "total_token_throughput"),
        )
        if summary.get(key) is not None
    ]
    for name in metrics:
        heading, short = LATENCIES[name]
        lines.append(f"{heading:-^{WIDTH}}")
        lines += [_line(f"Mean {short} (ms):", summary[f"mean_{name}_ms"])]
        lines += [_line(f"Median {short} (ms):", summary[f"median_{name}_ms"])]
        lines += [_line(f"Std {short} (ms):", summary[f"std_{name}_ms"])]
        lines += [_line(f"P{q:g} {short} (ms):", summary[f"p{q:g}_{name}_ms"]) for q in percentiles]
        if name == "itl":
            lines += [_line("Max ITL (ms):", summary["p100_itl_ms"])]
    lines.append(f"{'Client':-^{WIDTH}}")
    if summary["max_concurrency"]:
        lines += [_line("Mean queue time (ms):", summary["mean_client_queue_time_ms"])]
    for label, name in (("send", "client_send_lag"), ("event-loop", "client_loop_lag")):
        lines += [_line(f"Median {label} lag (ms):", summary[f"median_{name}_ms"])]
        lines += [_line(f"P99 {label} lag (ms):", summary[f"p99_{name}_ms"])]
        lines += [_line(f"Max {label} lag (ms):", summary[f"p100_{name}_ms"])]
    if summary["errors"]:
        lines.append(f"{'Errors':-^{WIDTH}}")
        for kind, found in sorted(summary["errors"].items(), key=lambda item: -item[1]["count"]):
            lines += [_line(f"{kind}:", found["count"]), f"  first: {found['first']}"]
    return [*lines, "=" * WIDTH]


def warnings(summary: dict[str, Any]) -> list[str]:
    """What makes the figures doubtful."""
    found = []
    late = summary["p99_client_loop_lag_ms"] or 0.0
    if late > LATE_MS:
        found.append(f"this client was overloaded (late by {late:.0f} ms at P99): latencies hold its own delays")
    if summary["requests_without_usage"]:
        found.append(f"{summary['requests_without_usage']} answers had no usage: their tokens are not counted")
    return found
