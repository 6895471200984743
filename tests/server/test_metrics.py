"""/metrics: the names, types and labels that dashboards of vLLM and SGLang ask for, and that the figures are right."""

import re
import time

import httpx
import pytest

from deepinfer.observability.stats import StatsLogger, StepStats
from deepinfer.server.metrics import Metrics
from tests.server.process import MODEL, Server

# As vLLM and SGLang document them; those of features that are not there yet are left out.
VLLM = {
    "gauge": ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    "counter": ("num_preemptions_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    "histogram": (
        "iteration_tokens_total", "request_prompt_tokens", "request_generation_tokens",
        "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens",
        "time_to_first_token_seconds", "time_per_output_token_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds",
    ),
}  # fmt: skip
SGLANG = {
    "gauge": (
        "num_running_reqs", "num_queue_reqs", "token_usage", "max_total_num_tokens", "num_used_tokens",
        "gen_throughput", "num_grammar_queue_reqs",
    ),
    "counter": (
        "prompt_tokens_total", "generation_tokens_total", "num_requests_total", "num_aborted_requests_total",
        "num_retracted_requests_total", "num_so_requests_total",
    ),
    "histogram": (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
        "queue_time_seconds",
    ),
}  # fmt: skip


def generate(server: Server, n: int = 2) -> None:
    extra = {"ignore_eos": True}
    server.client.completions.create(model=MODEL, prompt=[0, 50, 51], max_tokens=5, n=n, extra_body=extra)
    server.wait_for("deepinfer:num_requests_running", 0)


@pytest.mark.parametrize(("prefix", "names"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_every_known_name_has_its_type_and_labels(server: Server, prefix: str, names: dict[str, tuple]) -> None:
    generate(server)
    text = httpx.get(f"{server.url}/metrics").text
    for kind, metrics in names.items():
        for name in metrics:
            assert f"# TYPE {prefix}:{name} {kind}\n" in text, name
            sample = f"{prefix}:{name}" + ("_count" if kind == "histogram" else "")
            (labels,) = set(re.findall(rf"^{sample}\{{(.*)\}} ", text, re.MULTILINE)[:1])
            assert f'model_name="{MODEL}"' in labels and 'engine="0"' in labels, name


def test_other_names_carry_the_same_figures(server: Server) -> None:
    generate(server)
    text = httpx.get(f"{server.url}/metrics").text

    def samples(name: str) -> list[str]:
        return [line.removeprefix(name) for line in text.splitlines() if re.match(rf"{name}(_bucket|_sum)?[ {{]", line)]

    for ours, theirs in (
        ("deepinfer:generation_tokens_total", "vllm:generation_tokens_total"),
        ("deepinfer:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        ("deepinfer:request_success_total", "vllm:request_success_total"),
        ("deepinfer:request_queue_time_seconds", "sglang:queue_time_seconds"),
    ):
        assert samples(ours) == samples(theirs) != []


def test_figures_of_one_request(server: Server) -> None:
    counts = {
        "vllm:request_max_num_generation_tokens_count": 1,
        "vllm:request_max_num_generation_tokens_sum": 5,
        "vllm:request_generation_tokens_count": 2,
        "vllm:request_inference_time_seconds_count": 2,
        "vllm:request_time_per_output_token_seconds_count": 2,
        "vllm:request_params_n_sum": 2,
        "sglang:num_requests_total": 2,
        "sglang:num_aborted_requests_total": 0,
        "vllm:iteration_tokens_total_sum": 2 * (3 + 5),  # each of the n answers reads the prompt itself
    }
    generate(server)
    before = {name: server.metric(name) for name in counts}
    handled = server.metric("http_request_duration_seconds_count", handler="/v1/completions", method="POST")
    generate(server)
    server.wait_for("vllm:iteration_tokens_total_sum", before["vllm:iteration_tokens_total_sum"] + 16)
    assert {name: server.metric(name) - before[name] for name in counts} == counts
    after = server.metric("http_request_duration_seconds_count", handler="/v1/completions", method="POST")
    assert after == handled + 1
    assert server.metric("vllm:cache_config_info", block_size="128", cache_dtype="auto") == 1
    assert server.metric("sglang:max_total_num_tokens") % 128 == 0 < server.metric("sglang:max_total_num_tokens")


def test_grammars_are_counted_and_timed(server: Server) -> None:
    names = (
        "sglang:num_so_requests_total",
        "deepinfer:grammar_wait_seconds_count",
        "deepinfer:grammar_wait_seconds_sum",
    )
    before = [server.metric(name) for name in names]
    began = time.monotonic()
    for regex, status in (("[ab]{3}", 200), ("[ab]{3}", 200), ("(?=a)", 400)):
        body = {"model": MODEL, "prompt": "hi", "regex": regex, "max_tokens": 5}
        assert server.http.post("/v1/completions", json=body).status_code == status
    asked, timed, seconds = (server.metric(name) - old for name, old in zip(names, before, strict=True))
    assert asked == timed == 3 and 0 < seconds < time.monotonic() - began
    assert server.metric("sglang:num_grammar_queue_reqs") == 0, "also after one that cannot be compiled"


def test_steps_are_counted_by_their_tokens() -> None:
    metrics, statistics = Metrics("m"), StatsLogger(interval=0)
    for prompt, output in ((0, 1), (7, 1), (7, 2), (20000, 1), (0, 8)):
        statistics.record(StepStats(prompt, output, 1, 0, 0.0, 0))
    metrics.update(statistics)
    found = re.findall(r'deepinfer:iteration_tokens_total_bucket\{.*le="(.*?)".*\} (\S+)', metrics.render().decode())
    assert found[:4] == [("1.0", "1.0"), ("8.0", "3.0"), ("16.0", "4.0"), ("32.0", "4.0")]
    assert found[-2:] == [("16384.0", "4.0"), ("+Inf", "5.0")]
    assert "deepinfer:iteration_tokens_total_sum{" in metrics.render().decode()
