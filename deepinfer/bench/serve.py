"""`deepinfer bench serve`: load on any OpenAI-compatible server, and what its clients would have seen.

Workload and arrivals (serve_workload) -> load generator (serve_client) -> figures and table (serve_report).
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from deepinfer.bench import serve_files as files
from deepinfer.bench import serve_workload as workload
from deepinfer.bench.results import Record, measured
from deepinfer.bench.serve_client import Load, Sample, Target, connect, error_message, run_load
from deepinfer.bench.serve_report import LATENCIES, detailed, summarize, table, warnings

FILE_DATASETS = ("sharegpt", "sonnet", "spec_bench", "burstgpt", "custom", "timed_trace")
DATASETS = ("random", "random-ids", "prefix_repetition", *FILE_DATASETS)
BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
# What vLLM and SGLang call the two APIs and the workloads.
OTHER_NAMES = {
    "vllm": "openai", "sglang": "openai", "sglang-oai": "openai", "sglang-oai-chat": "openai-chat",
    "generated-shared-prefix": "prefix_repetition", "mooncake": "timed_trace",
}  # fmt: skip
RAMPS = ("linear", "exponential")
DEFAULT_NUM_PROMPTS = 100
AREA = "serve"

# summary key -> (name, unit, higher is better): what --record keeps
RECORDED = {
    "request_throughput": ("request throughput", "req/s", True),
    "request_goodput": ("request goodput", "req/s", True),
    "output_throughput": ("output token throughput", "tok/s", True),
    "total_token_throughput": ("total token throughput", "tok/s", True),
    "median_ttft_ms": ("median TTFT", "ms", False),
    "p99_ttft_ms": ("P99 TTFT", "ms", False),
    "median_tpot_ms": ("median TPOT", "ms", False),
    "p99_tpot_ms": ("P99 TPOT", "ms", False),
    "median_itl_ms": ("median ITL", "ms", False),
    "p99_itl_ms": ("P99 ITL", "ms", False),
    "median_e2el_ms": ("median E2E latency", "ms", False),
}


class ServerUnusable(Exception):
    """The server cannot be measured: no model list, or no warm-up request succeeded."""


@dataclass(frozen=True)
class Settings:
    """The options of the command; lengths in tokens.  Raises ValueError naming the option."""

    base_url: str = "http://127.0.0.1:8000"
    backend: str = "openai"
    endpoint: str | None = None
    model: str | None = None  # None: the first of /v1/models
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    dataset_name: str = "random"
    dataset_path: Path | None = None
    tokenizer: str | None = None
    num_prompts: int | None = None
    seed: int = 0
    num_warmups: int = 1
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_output_len: int = 128
    sharegpt_output_len: int | None = None
    custom_output_len: int | None = None
    sonnet_prefix_len: int = 200
    sonnet_input_len: int = 550
    sonnet_output_len: int = 150
    spec_bench_output_len: int = files.DEFAULT_OUTPUT_LEN
    spec_bench_category: str | None = None
    timed_trace_sec_multiplier: float = 0.001
    timed_trace_chunk_hash_size: int = 512
    request_rate: float | None = None  # None: a trace's own times, else all at once
    burstiness: float = 1.0
    ramp_up_strategy: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    max_concurrency: int | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)
    goodput: dict[str, float] = field(default_factory=dict)
    percentiles: tuple[float, ...] = (90.0, 99.0)
    metadata: dict[str, str] = field(default_factory=dict)
    flush_cache: bool = False
    label: str | None = None

    def __post_init__(self) -> None:
        for name in ("backend", "dataset_name"):
            given = getattr(self, name)
            object.__setattr__(self, name, OTHER_NAMES.get(given, given))
        for name, allowed in (("backend", tuple(BACKENDS)), ("dataset_name", DATASETS)):
            if getattr(self, name) not in allowed:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"--base-url must start with http:// or https://, got {self.base_url!r}")
        if self.backend == "openai-chat" and self.dataset_name == "random-ids":
            raise ValueError("--backend openai-chat cannot send the token IDs of random-ids, use --backend openai")
        ramped = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if any(ramped) and not (all(ramped) and self.ramp_up_strategy in RAMPS and self.request_rate is None):
            needs = f"{' or '.join(RAMPS)}, --ramp-up-start-rps and --ramp-up-end-rps, and no --request-rate"
            raise ValueError(f"--ramp-up-strategy must be {needs}")
        if self.dataset_name in FILE_DATASETS and self.dataset_path is None:
            raise ValueError(f"--dataset-name {self.dataset_name} needs --dataset-path")
        if not self.timeout > 0:
            raise ValueError(f"--timeout must be above 0, got {self.timeout}")

    @property
    def server(self) -> str:
        """The base URL without a final slash or /v1."""
        return self.base_url.rstrip("/").removesuffix("/v1")


def make_requests(settings: Settings, draw: np.random.Generator) -> list[workload.Request]:
    """The requests of the dataset, in the order of arrival."""
    tokenizer = workload.load_tokenizer(settings.tokenizer) if settings.tokenizer else None
    count = settings.num_prompts
    if settings.dataset_name == "sharegpt":
        assert settings.dataset_path is not None
        return workload.sharegpt_requests(
            settings.dataset_path, count, settings.sharegpt_output_len, tokenizer, draw
        )  # fmt: skip
    if settings.dataset_name == "custom":
        assert settings.dataset_path is not None
        return files.custom_requests(settings.dataset_path, count, settings.custom_output_len)
    if settings.dataset_name == "spec_bench":
        assert settings.dataset_path is not None
        return files.spec_bench_requests(
            settings.dataset_path, count, settings.spec_bench_output_len, settings.spec_bench_category, draw
        )
    if settings.dataset_name == "sonnet":
        assert settings.dataset_path is not None
        return files.sonnet_requests(
            settings.dataset_path, count or DEFAULT_NUM_PROMPTS, settings.sonnet_prefix_len,
            settings.sonnet_input_len, settings.sonnet_output_len, tokenizer, draw,
        )  # fmt: skip
    words = workload.word_pool(tokenizer)
    if settings.dataset_name == "burstgpt":
        assert settings.dataset_path is not None
        return files.burstgpt_requests(settings.dataset_path, count, words, draw)
    if settings.dataset_name == "timed_trace":
        assert settings.dataset_path is not None
        requests = workload.trace_requests(
            settings.dataset_path, count, words, settings.timed_trace_sec_multiplier,
            settings.timed_trace_chunk_hash_size, draw,
        )  # fmt: skip
        if settings.backend == "openai-chat" and not all(isinstance(request.prompt, str) for request in requests):
            raise ValueError("--backend openai-chat cannot send the token IDs of the trace, use --backend openai")
        return requests
    count = count or DEFAULT_NUM_PROMPTS
    if settings.dataset_name == "prefix_repetition":
        return workload.shared_prefix_requests(
            words, count, settings.prefix_repetition_num_prefixes, settings.prefix_repetition_prefix_len,
            settings.prefix_repetition_suffix_len, settings.prefix_repetition_output_len, draw,
        )  # fmt: skip
    made_up = workload.random_requests(
        words, count, settings.random_input_len, settings.random_output_len, settings.random_range_ratio, draw
    )
    if settings.dataset_name == "random-ids":
        if tokenizer is None:
            raise ValueError("--dataset-name random-ids needs --tokenizer, which says how many token IDs there are")
        return workload.as_token_ids(made_up, words, tokenizer)
    return made_up


def make_arrivals(settings: Settings, requests: Sequence[workload.Request], draw: np.random.Generator) -> list[float]:
    """Seconds after the start: --request-rate where it is given, else the trace's own times, else all at once."""
    own = [request.arrival for request in requests if request.arrival is not None]
    if settings.request_rate is None and len(own) == len(requests):
        return own
    rate: Any = math.inf if settings.request_rate is None else settings.request_rate
    if settings.ramp_up_strategy is not None:
        start, end = settings.ramp_up_start_rps, settings.ramp_up_end_rps
        rate = workload.ramp(len(requests), start or 0.0, end or 0.0, settings.ramp_up_strategy)
    return workload.arrival_times(len(requests), rate, settings.burstiness, draw)


async def first_model(http: httpx.AsyncClient, server: str) -> str:
    """ID of the first of /v1/models.  Raises ServerUnusable."""
    url = f"{server}/v1/models"
    try:
        answer = await http.get(url, timeout=30)
        if answer.status_code != 200:
            raise ServerUnusable(f"{url}: HTTP {answer.status_code}: {error_message(answer.content)}")
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise ServerUnusable(f"{url}: {error or repr(error)}") from None
    except (ValueError, LookupError, TypeError):
        raise ServerUnusable(f"{url} names no model, use --model") from None


async def flush_cache(http: httpx.AsyncClient, server: str) -> None:
    """SGLang's route, else vLLM's.  Raises ServerUnusable where the server has neither."""
    for path in ("/flush_cache", "/reset_prefix_cache"):
        try:
            answer = await http.post(server + path, timeout=30)
        except httpx.HTTPError as error:
            raise ServerUnusable(f"{server}{path}: {error or repr(error)}") from None
        if answer.status_code == 200:
            return
        if answer.status_code != 404:
            raise ServerUnusable(f"{server}{path}: HTTP {answer.status_code}: {error_message(answer.content)}")
    raise ServerUnusable(f"{server} has no route that clears its cache: leave --flush-cache out")


async def run(
    settings: Settings, on_start: Callable[[int], None], on_done: Callable[[Sample], None]
) -> tuple[dict[str, Any], Load]:
    """Warm up, measure, summarize.  `on_start` gets the number of requests.  Raises ValueError or ServerUnusable."""
    requests_draw, arrivals_draw = np.random.default_rng(settings.seed).spawn(2)
    requests = make_requests(settings, requests_draw)
    arrivals = make_arrivals(settings, requests, arrivals_draw)
    options: dict[str, Any] = {"temperature": settings.temperature}
    options |= ({"ignore_eos": True} if settings.ignore_eos else {}) | settings.extra_body  # not all servers know it
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    concurrency = min(settings.max_concurrency or len(requests), len(requests))
    async with connect(max(concurrency, settings.num_warmups), headers) as clients:
        model = settings.model or await first_model(clients[0], settings.server)
        url = settings.server + (settings.endpoint or BACKENDS[settings.backend])
        target = Target(url, model, settings.backend == "openai-chat", settings.timeout, options)
        if warm_ups := workload.warm_up_requests(requests, settings.num_warmups):
            answers = (await run_load(clients, target, warm_ups, [0.0] * len(warm_ups))).samples
            if all(sample.error for sample in answers):
                raise ServerUnusable(f"warm-up failed: {answers[0].error}: {answers[0].message}")
        if settings.flush_cache:
            await flush_cache(clients[0], settings.server)
        on_start(len(requests))
        load = await run_load(clients, target, requests, arrivals, settings.max_concurrency, on_done)
    trace_times = settings.request_rate is None and settings.ramp_up_strategy is None and any(arrivals)
    rate = _finite(settings.request_rate)
    described = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": settings.backend,
        "label": settings.label,
        "base_url": settings.server,
        "model_id": model,
        "dataset_name": settings.dataset_name,
        "num_prompts": len(requests),
        "seed": settings.seed,
        "request_rate": "trace" if trace_times else "ramp" if settings.ramp_up_strategy else rate,
        "burstiness": _finite(settings.burstiness),
        "max_concurrency": settings.max_concurrency,
        "ramp_up_strategy": settings.ramp_up_strategy,
        "ramp_up_start_rps": settings.ramp_up_start_rps,
        "ramp_up_end_rps": settings.ramp_up_end_rps,
        "goodput_limits_ms": settings.goodput,
    }
    return settings.metadata | described | summarize(load, settings.goodput, settings.percentiles), load


def _finite(value: float | None) -> float | str:
    """JSON has no infinity."""
    return "inf" if value is None or math.isinf(value) else value


def run_with_progress(settings: Settings, show_progress: bool = True) -> tuple[dict[str, Any], Load]:
    """`run` with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    # Few redraws: drawing takes time from the event loop that stamps the chunks.
    with Progress(
        *columns, console=console, disable=not (show_progress and console.is_terminal), refresh_per_second=2
    ) as progress:
        task = progress.add_task("warming up", total=None)

        def on_done(sample: Sample) -> None:
            nonlocal failed
            failed += sample.error is not None
            progress.update(task, advance=1, description=f"{failed} failed" if failed else "requests")

        return asyncio.run(
            run(settings, lambda count: progress.update(task, total=count, description="requests"), on_done)
        )


def print_table(
    summary: dict[str, Any], percentiles: Sequence[float], metrics: Sequence[str] = tuple(LATENCIES)
) -> None:
    """The table on standard output, warnings on standard error."""
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False, markup=False)
    for line in table(summary, percentiles, metrics):
        console.print(line, style="bold" if line.startswith(("=", "-")) else None)
    for warning in warnings(summary):
        print(f"warning: {warning}", file=sys.stderr)


def write_json(path: Path, summary: dict[str, Any], load: Load | None = None, append: bool = False) -> None:
    """The summary, with `samples` of every request (seconds), and vLLM's lists of them, where `load` is given.

    `append` adds it as one line to what the file has.
    """
    if load is not None:
        derived = [{"ttft": sample.ttft, "tpot": sample.tpot, "itl": sample.itl} for sample in load.samples]
        samples = [asdict(sample) | more for sample, more in zip(load.samples, derived, strict=True)]
        summary = summary | detailed(load) | {"samples": samples}
    path.parent.mkdir(parents=True, exist_ok=True)
    if append:
        with path.open("a") as file:
            file.write(json.dumps(summary, ensure_ascii=False) + "\n")
        return
    path.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")


def result_records(name: str, summary: dict[str, Any], command: str) -> list[Record]:
    """Records for benchmarks/results/serve.json; figures that were not measured are left out."""
    return [
        measured(f"{name}: {label}", part="3", unit=unit, value=summary[key], command=command, higher_is_better=higher)
        for key, (label, unit, higher) in RECORDED.items()
        if summary.get(key) is not None
    ]
