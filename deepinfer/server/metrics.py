"""Prometheus metrics under the names that vLLM users know, with the prefix `deepinfer:`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from deepinfer.engine.client import RemoteStatistics
from deepinfer.observability.stats import StatsLogger
from deepinfer.outputs import RequestMetrics

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)

# Totals of the engine's statistics -> counter.
_ENGINE_COUNTERS = {
    "flops": ("estimated_flops_per_gpu", "Estimated floating-point operations of the target model."),
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "drafts": ("spec_decode_num_drafts", "Rounds of speculative decoding."),
    "accepted": ("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
}
# Fields of WindowStats -> gauge.
_ENGINE_GAUGES = {
    "prompt_throughput": ("avg_prompt_throughput_toks_per_s", "Prompt tokens per second, latest 10 s."),
    "generation_throughput": ("avg_generation_throughput_toks_per_s", "Generated tokens per second, latest 10 s."),
    "moe_balance": ("moe_expert_balance", "Tokens of the busiest expert over the mean, latest 10 s."),
    "mfu": ("mfu", "Model FLOPs utilisation, 0 to 1, latest 10 s."),
}


class Metrics:
    """One registry a server; every metric carries the label `model_name`."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name
        self.running = self._gauge("num_requests_running", "Requests that hold cache.")
        self.waiting = self._gauge("num_requests_waiting", "Requests that wait to be scheduled.")
        self.cache_usage = self._gauge("kv_cache_usage_perc", "Used share of the KV cache blocks, 0 to 1.")
        self.preemptions = self._counter("num_preemptions", "Times a running request was put back to wait.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.success = Counter(
            "deepinfer:request_success", "Requests ended, by reason.", ("model_name", "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Gap between streamed outputs, divided by their tokens.", _SECONDS
        )
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _SECONDS)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to first scheduling.", _SECONDS)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "Scheduling to first token.", _SECONDS)
        self.decode_time = self._histogram("request_decode_time_seconds", "First to last token.", _SECONDS)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens a request.", _TOKENS)
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens a request.", _TOKENS
        )
        self.params_n = self._histogram("request_params_n", "Value of n.", (1, 2, 5, 10, 20, 50, 100))
        self.params_max_tokens = self._histogram("request_params_max_tokens", "Value of max_tokens.", _TOKENS)
        self.http_requests = Counter(
            "http_requests", "HTTP requests answered.", ("handler", "method", "status"), registry=self.registry
        )

        self.rejected = Counter(
            "deepinfer:requests_rejected", "Requests answered 429, by reason.", ("model_name", "reason"),
            registry=self.registry,
        )  # fmt: skip
        self.engine_restarts = self._gauge("engine_restarts", "Times the engine process died and was started again.")

        self._engine_gauges: dict[str, Gauge] = {}
        self._engine_counters: dict[str, Counter] = {}
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

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"deepinfer:{name}", text, ("model_name",), registry=self.registry).labels(self.model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"deepinfer:{name}", text, ("model_name",), registry=self.registry).labels(self.model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"deepinfer:{name}", text, ("model_name",), registry=self.registry, buckets=buckets)
        return metric.labels(self.model_name)

    def admit(self, prompt_tokens: int, n: int, max_tokens: int | None) -> None:
        """Count one prompt that passed all checks."""
        self.prompt_tokens.inc(prompt_tokens)
        self.request_prompt_tokens.observe(prompt_tokens)
        self.params_n.observe(n)
        if max_tokens is not None:
            self.params_max_tokens.observe(max_tokens)

    def render(self) -> bytes:
        return generate_latest(self.registry)


@dataclass
class SequenceClock:
    """Observes one generated sequence: call `tokens` for every streamed output and `end` once."""

    metrics: Metrics
    arrival: float = field(default_factory=time.monotonic)  # before tokenising, so that TTFT is what the client waits
    first: float | None = None
    last: float = 0.0
    count: int = 0

    def tokens(self, number: int) -> None:
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
        now = time.monotonic()
        self.metrics.success.labels(self.metrics.model_name, reason).inc()
        self.metrics.end_to_end.observe(now - self.arrival)
        self.metrics.request_generation_tokens.observe(self.count)
        if self.first is not None:
            self.metrics.decode_time.observe(now - self.first)
        if engine is None:
            return
        self.metrics.preemptions.inc(engine.num_preemptions)
        if engine.first_scheduled_time is not None:
            self.metrics.queue_time.observe(max(0.0, engine.first_scheduled_time - engine.arrival_time))
            if engine.first_token_time is not None:
                self.metrics.prefill_time.observe(engine.first_token_time - engine.first_scheduled_time)
