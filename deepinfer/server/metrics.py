"""Prometheus metrics: vLLM's names, types and labels with the prefix `deepinfer:`; see also metric_names.py."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from deepinfer.engine.remote_statistics import RemoteStatistics
from deepinfer.observability import block_lifetimes
from deepinfer.observability.histograms import STEP_TOKENS, TotalsHistogram
from deepinfer.observability.stats import StatsLogger, accepted_at
from deepinfer.outputs import RequestMetrics
from deepinfer.server.fast_metrics import FastCounter, FastHistogram
from deepinfer.server.metric_names import ManyNames

# vLLM's buckets.  Gaps between tokens start lower than there: a small model needs a millisecond.
_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_GAPS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_LATENCIES = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)

# Totals of the engine's statistics -> counter.
_ENGINE_COUNTERS = {
    "flops": ("estimated_flops_per_gpu", "Estimated floating-point operations of the target model."),
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "drafts": ("spec_decode_num_drafts", "Rounds of speculative decoding."),
    "draft_tokens": ("spec_decode_num_draft_tokens", "Draft tokens verified."),
    "accepted": ("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
}
# Fields of WindowStats -> gauge.
_ENGINE_GAUGES = {
    "prompt_throughput": ("avg_prompt_throughput_toks_per_s", "Prompt tokens per second, latest 10 s."),
    "generation_throughput": ("avg_generation_throughput_toks_per_s", "Generated tokens per second, latest 10 s."),
    "moe_balance": ("moe_expert_balance", "Tokens of the busiest expert over the mean, latest 10 s."),
    "mfu": ("mfu", "Model FLOPs utilisation, 0 to 1, latest 10 s."),
    "accepted_length": ("spec_decode_accepted_length", "Tokens a round, the model's own included, latest 10 s."),
    "acceptance_rate": ("spec_decode_acceptance_rate", "Accepted share of the draft tokens, 0 to 1, latest 10 s."),
}
# Histograms that the engine counts -> histogram.
_ENGINE_HISTOGRAMS = (
    (STEP_TOKENS, "iteration_tokens_total", "Tokens of a step: of prompts, and generated."),
    (block_lifetimes.LIFETIME, "kv_block_lifetime_seconds", "Time that a cache block kept its content; of a sample."),
    (
        block_lifetimes.IDLE, "kv_block_idle_before_evict_seconds",
        "Time from a cache block's last use to its next content; of a sample.",
    ),
    (block_lifetimes.REUSE_GAP, "kv_block_reuse_gap_seconds", "Time between uses of a cache block; of a sample."),
)  # fmt: skip


_LABELS = ("model_name", "engine")


class Metrics:
    """One registry a server; every metric carries the labels `model_name` and `engine`, which is always "0"."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name
        self._labels = {"model_name": model_name, "engine": "0"}
        self.running = self._gauge("num_requests_running", "Requests that hold cache.")
        self.waiting = self._gauge("num_requests_waiting", "Requests that wait to be scheduled.")
        self.cache_usage = self._gauge("kv_cache_usage_perc", "Used share of the KV cache blocks, 0 to 1.")
        self.preemptions = self._counter("num_preemptions", "Times a running request was put back to wait.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.requests = self._counter("num_requests", "Sequences ended.")
        self.aborted = self._counter("num_aborted_requests", "Sequences ended by an abort or a lost client.")
        self.success = Counter(
            "deepinfer:request_success", "Sequences ended, by reason.", (*_LABELS, "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Gap between streamed outputs, divided by their tokens.", _GAPS
        )
        self.time_per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean gap between the tokens of a sequence.", _GAPS
        )
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _LATENCIES)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to first scheduling.", _LATENCIES)
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "First scheduling to last token.", _LATENCIES
        )
        self.prefill_time = self._histogram("request_prefill_time_seconds", "Scheduling to first token.", _LATENCIES)
        self.decode_time = self._histogram("request_decode_time_seconds", "First to last token.", _LATENCIES)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens a request.", _TOKENS)
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens a request.", _TOKENS
        )
        self.longest_generation = self._histogram(
            "request_max_num_generation_tokens", "Generated tokens of the longest of the n answers.", _TOKENS
        )
        self.params_n = self._histogram("request_params_n", "Value of n.", (1, 2, 5, 10, 20, 50, 100))
        self.params_max_tokens = self._histogram("request_params_max_tokens", "Value of max_tokens.", _TOKENS)
        self.structured = self._counter("num_so_requests", "Requests for structured output.")
        self.waiting_for_grammar = self._gauge("num_grammar_queue_reqs", "Requests whose grammar is being compiled.")
        self.grammar_time = self._histogram(
            "grammar_wait_seconds", "What a request waited for its grammar, next to nothing if it is known.", _SECONDS
        )
        self.block_size = 0
        self.cache_tokens = self._gauge("kv_cache_num_tokens", "Tokens that the KV cache blocks can hold.")
        self.used_tokens = self._gauge("kv_cache_used_tokens", "Tokens that the used KV cache blocks can hold.")
        self.histograms = [EngineHistogram(*described, self._labels) for described in _ENGINE_HISTOGRAMS]
        for histogram in self.histograms:
            self.registry.register(histogram)
        self.accepted = AcceptedByPosition(self._labels)
        self.registry.register(self.accepted)
        self.http_requests = Counter(
            "http_requests", "HTTP requests answered.", ("handler", "method", "status"), registry=self.registry
        )
        self.http_seconds = Histogram(
            "http_request_duration_seconds", "Arrival to the last byte of the answer.", ("handler", "method"),
            registry=self.registry, buckets=_LATENCIES,
        )  # fmt: skip
        self.rejected = Counter(
            "deepinfer:requests_rejected", "Requests answered 429, by reason.", (*_LABELS, "reason"),
            registry=self.registry,
        )  # fmt: skip
        self.engine_restarts = self._gauge("engine_restarts", "Times the engine process died and was started again.")

        self._cache_is_set = False
        self._engine_gauges: dict[str, Gauge] = {}
        self._engine_counters: dict[str, FastCounter] = {}
        self._engine_totals: dict[str, float] = {}

    def update(self, statistics: StatsLogger | RemoteStatistics) -> None:
        """Take over the engine's figures; those of features it does not have do not appear."""
        window = statistics.window()
        for name, described in _ENGINE_GAUGES.items():
            value = getattr(window, name)
            if name not in self._engine_gauges and value is not None:
                self._engine_gauges[name] = self._gauge(*described)
            if name in self._engine_gauges:
                self._engine_gauges[name].set(value or 0.0)
        for name, described in _ENGINE_COUNTERS.items():
            total = statistics.totals.get(name)
            if total is None:
                continue
            if name not in self._engine_counters:
                self._engine_counters[name] = self._counter(*described)
            self._engine_counters[name].inc(total - self._engine_totals.get(name, 0.0))
            self._engine_totals[name] = total
        self.accepted.totals = statistics.totals
        for histogram in self.histograms:
            histogram.totals = statistics.totals

    def set_cache(self, block_size: int, num_blocks: int, cache_dtype: str) -> None:
        """`cache_config_info`, as vLLM has it: a 1 whose labels are the settings."""
        if self._cache_is_set:
            return
        self._cache_is_set = True
        self.block_size = block_size
        self.cache_tokens.set(block_size * num_blocks)
        names = (*_LABELS, "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")
        info = Gauge("deepinfer:cache_config_info", "Settings of the KV cache.", names, registry=self.registry)
        info.labels(self.model_name, "0", str(block_size), str(num_blocks), cache_dtype, "False").set(1)

    def end(self, reason: str) -> None:
        """Count a sequence that ended for this reason."""
        self.success.labels(self.model_name, "0", reason).inc()
        self.requests.inc()
        if reason == "abort":
            self.aborted.inc()

    @contextmanager
    def grammar(self) -> Iterator[None]:
        """Around the wait of a request for its grammar."""
        began = time.monotonic()
        self.structured.inc()
        self.waiting_for_grammar.inc()
        try:
            yield
        finally:
            self.waiting_for_grammar.dec()
            self.grammar_time.observe(time.monotonic() - began)

    def reject(self, reason: str) -> None:
        """Count a request that is answered 429."""
        self.rejected.labels(self.model_name, "0", reason).inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"deepinfer:{name}", text, _LABELS, registry=self.registry).labels(self.model_name, "0")

    def _counter(self, name: str, text: str) -> FastCounter:
        return FastCounter(f"deepinfer:{name}", text, self._labels, self.registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> FastHistogram:
        return FastHistogram(f"deepinfer:{name}", text, self._labels, self.registry, bounds)

    def admit(self, prompt_tokens: int, n: int, max_tokens: int | None) -> None:
        """Count one prompt that passed all checks."""
        self.prompt_tokens.inc(prompt_tokens)
        self.request_prompt_tokens.observe(prompt_tokens)
        self.params_n.observe(n)
        if max_tokens is not None:
            self.params_max_tokens.observe(max_tokens)

    def render(self) -> bytes:
        return generate_latest(ManyNames(self.registry))


class EngineHistogram(Collector):
    """A histogram that the engine counts.  `totals` are those of its statistics."""

    def __init__(self, histogram: TotalsHistogram, name: str, text: str, labels: dict[str, str]) -> None:
        self._histogram = histogram
        self._name, self._text, self._labels = f"deepinfer:{name}", text, labels
        self.totals: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        counts = self._histogram.buckets(self.totals)
        bounds = map(floatToGoString, (*self._histogram.bounds, math.inf))
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(
            list(self._labels.values()), list(zip(bounds, counts, strict=True)), self._histogram.sum(self.totals)
        )
        yield family


class AcceptedByPosition(Collector):
    """Accepted drafts by their position in the round, from 0, as the engine counts them in `totals`."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self.totals: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position in the round."
        family = CounterMetricFamily(f"deepinfer:{name}", text, labels=[*self._labels, "position"])
        position = 0
        while (number := self.totals.get(accepted_at(position))) is not None:
            family.add_metric([*self._labels.values(), str(position)], number)
            position += 1
        if position:
            yield family


@dataclass
class Longest:
    """Of the n answers of one prompt: how many have not ended, and the most tokens that one had."""

    metrics: Metrics
    running: int
    tokens: int = 0

    def end(self, tokens: int) -> None:
        self.running -= 1
        self.tokens = max(self.tokens, tokens)
        if self.running == 0:
            self.metrics.longest_generation.observe(self.tokens)


@dataclass
class SequenceClock:
    """Observes one generated sequence: call `tokens` for every streamed output and `end` once."""

    metrics: Metrics
    longest: Longest  # of the answers to the same prompt
    arrival: float = field(default_factory=time.monotonic)  # before tokenising, so that TTFT is what the client waits
    first: float | None = None
    last: float = 0.0
    count: int = 0

    def tokens(self, number: int) -> None:
        """Count `number` new tokens that have just come."""
        now = time.monotonic()
        if self.first is None:
            self.first = now
            self.metrics.time_to_first_token.observe(now - self.arrival)
        else:
            self.metrics.inter_token_latency.observe((now - self.last) / number)
        self.last = now
        self.count += number
        self.metrics.generation_tokens.inc(number)

    def end(self, reason: str, engine: RequestMetrics | None) -> None:
        """Count the end of the sequence; `engine`: its times there, if it got so far."""
        now = time.monotonic()
        self.metrics.end(reason)
        self.longest.end(self.count)
        self.metrics.end_to_end.observe(now - self.arrival)
        self.metrics.request_generation_tokens.observe(self.count)
        if self.first is not None:
            self.metrics.decode_time.observe(now - self.first)
            if self.count > 1:
                self.metrics.time_per_token.observe((self.last - self.first) / (self.count - 1))
        if engine is None:
            return
        self.metrics.preemptions.inc(engine.num_preemptions)
        if engine.first_scheduled_time is not None:
            self.metrics.queue_time.observe(max(0.0, engine.first_scheduled_time - engine.arrival_time))
            ended = engine.finished_time or now  # one clock: the engine runs on this machine
            self.metrics.inference_time.observe(max(0.0, ended - engine.first_scheduled_time))
            if engine.first_token_time is not None:
                self.metrics.prefill_time.observe(engine.first_token_time - engine.first_scheduled_time)
