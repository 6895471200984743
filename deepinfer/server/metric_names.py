"""Metrics under the names of other servers as well, so that their dashboards and alerts go on working."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

PREFIX = "deepinfer:"
# Names that vLLM has with its own prefix: same type, same unit, same labels.
_VLLM = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "prompt_tokens",
    "generation_tokens", "request_success", "prefix_cache_queries", "prefix_cache_hits", "iteration_tokens_total",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens",
    "cache_config_info", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos", "estimated_flops_per_gpu",
    "kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds",
)  # fmt: skip
_OLDER_VLLM = {"inter_token_latency_seconds": "time_per_output_token_seconds"}
_SGLANG = {
    "num_requests_running": "num_running_reqs",
    "num_requests_waiting": "num_queue_reqs",
    "kv_cache_usage_perc": "token_usage",
    "kv_cache_num_tokens": "max_total_num_tokens",
    "kv_cache_used_tokens": "num_used_tokens",
    "avg_generation_throughput_toks_per_s": "gen_throughput",
    "spec_decode_accepted_length": "spec_accept_length",
    "spec_decode_acceptance_rate": "spec_accept_rate",
    "num_preemptions": "num_retracted_requests",
    "num_so_requests": "num_so_requests",
    "num_grammar_queue_reqs": "num_grammar_queue_reqs",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "num_requests": "num_requests",
    "num_aborted_requests": "num_aborted_requests",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_queue_time_seconds": "queue_time_seconds",
}


def other_names(name: str) -> list[str]:
    """What vLLM and SGLang call the metric that is `deepinfer:name` here."""
    names = [f"vllm:{name}"] if name in _VLLM else []
    names += [f"vllm:{_OLDER_VLLM[name]}"] if name in _OLDER_VLLM else []
    return names + ([f"sglang:{_SGLANG[name]}"] if name in _SGLANG else [])


class ManyNames(CollectorRegistry):
    """What `registry` collects, each metric under its own name and then under those of other servers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            for name in other_names(family.name.removeprefix(PREFIX)):
                renamed = copy(family)
                renamed.name = name
                renamed.samples = [
                    sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples
                ]
                yield renamed
