"""Does a model fit on these GPUs, and how many sequences beside it? Arithmetic on the config alone.

Layout assumed: attention and everything dense replicated on every GPU, routed experts and Engram tables sharded over
all of them, each sequence's caches on one GPU. Weights stay in their stored formats (FP8, FP4, BF16).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from deepinfer.config.model import ModelConfig
from deepinfer.models.caches import CACHE_DTYPES, StateCache, block_bytes
from deepinfer.models.checkpoint_format import ParameterSpec, parameter_specs, stored_tensors

PACKAGE = Path(__file__).parents[1]
BUILT_IN_CONFIGS = {
    "nano": PACKAGE / "checkpoints" / "nano" / "config.json",
    "DeepSeek-V4.1-Flash": PACKAGE / "config" / "deepseek_v41_flash.json",
}
BLOCK_TOKENS = 128


@dataclass(frozen=True)
class DeploymentPlan:
    """Sizes in bytes, counts as integers; `active` and FLOPs exclude the draft head and the image tower."""

    num_gpus: int
    gpu_memory_bytes: int
    context_len: int
    fits: bool  # the weights and at least one sequence
    parameters: int
    active_parameters_per_decode_token: int
    active_parameters_per_prefill_token: int  # encoder half only: the decoder half runs for a short tail
    weight_bytes: int
    attention_weight_bytes: int  # with compressors and indexers
    routed_expert_weight_bytes: int
    engram_table_weight_bytes: int
    embedding_weight_bytes: int  # input and output
    draft_weight_bytes: int
    vision_weight_bytes: int
    other_weight_bytes: int  # shared experts, gates, mHC, norms, Engram projections
    weight_bytes_per_gpu: int
    kv_bytes_per_token: int  # rounded up
    kv_bytes_per_block: int  # 128 tokens
    state_bytes_per_sequence: int
    stored_state_bytes_per_sequence: int  # the part that outlives a preemption or prefix-cache store
    cache_bytes_per_sequence: int  # blocks and state at context_len
    free_bytes_per_gpu: int  # for caches; negative: the weights alone do not fit
    sequences_per_gpu: int
    sequences: int
    longest_sequence_tokens: int  # one sequence alone on a GPU
    flops_per_decode_token: int  # at context_len
    flops_per_prefill_token: int
    weight_bytes_read_per_decode_token: int  # at batch 1: the bandwidth floor of a decode step


def load_plan_config(model: str | Path) -> ModelConfig:
    """Config of a built-in name ("nano", "DeepSeek-V4.1-Flash"), a checkpoint folder or a config.json.

    Raises:
        ValueError: neither, or the config is invalid.
    """
    path = BUILT_IN_CONFIGS.get(str(model).removeprefix("deepseek-ai/"), Path(model))
    if not path.exists():
        names = ", ".join(BUILT_IN_CONFIGS)
        raise ValueError(f"model: {str(model)!r} is neither a path nor one of {names}")
    return ModelConfig.from_file(path)


def plan_deployment(
    config: ModelConfig,
    num_gpus: int,
    gpu_memory_bytes: int,
    context_len: int,
    kv_dtype: str = "fp8",
    memory_utilization: float = 0.9,
) -> DeploymentPlan:
    """Plans one replica on `num_gpus` GPUs of one size.

    Args:
        context_len: tokens of a sequence, prompt and answer.
        kv_dtype: "fp8" (packed FP4 / FP8 rows), or "bf16", "fp32", "fp64" for unquantised caches.
        memory_utilization: part of a GPU's memory for weights and caches; the rest is activations and the runtime.

    Raises:
        ValueError: an argument is out of range.
    """
    _require(num_gpus >= 1, "num_gpus", num_gpus, "at least 1")
    _require(gpu_memory_bytes >= 1, "gpu_memory_bytes", gpu_memory_bytes, "at least 1")
    longest = config.max_position_embeddings
    _require(1 <= context_len <= longest, "context_len", context_len, f"1..{longest} (max_position_embeddings)")
    _require(kv_dtype in CACHE_DTYPES, "kv_dtype", kv_dtype, ", ".join(CACHE_DTYPES))
    _require(0 < memory_utilization <= 1, "memory_utilization", memory_utilization, "above 0, at most 1")

    specs = list(parameter_specs(config).values())
    kinds = dict.fromkeys(("attention", "routed_expert", "engram_table", "embedding", "draft", "vision", "other"), 0)
    for spec in specs:
        kinds[_kind(spec)] += _stored_bytes(spec)
    per_gpu = sum(_bytes_on_one_gpu(spec, num_gpus) for spec in specs)

    block = block_bytes(config, BLOCK_TOKENS, CACHE_DTYPES[kv_dtype])
    state, stored_state = _state_bytes(config, kv_dtype)
    sequence = -(-context_len // BLOCK_TOKENS) * block + state
    # The null block and the null state slot are never given to a sequence.
    free = int(gpu_memory_bytes * memory_utilization) - per_gpu - block - state
    sequences = max(free // sequence, 0)
    alone = max(free - state, 0) // block * BLOCK_TOKENS if block else (longest if free >= state else 0)

    decode = [(spec, _active_share(spec, config)) for spec in specs]
    prefill = [(spec, share) for spec, share in decode if _runs_in_prefill(spec, config)]
    return DeploymentPlan(
        num_gpus=num_gpus,
        gpu_memory_bytes=gpu_memory_bytes,
        context_len=context_len,
        fits=sequences > 0,
        parameters=sum(prod(spec.shape) for spec in specs),
        active_parameters_per_decode_token=_active(decode),
        active_parameters_per_prefill_token=_active(prefill),
        weight_bytes=sum(kinds.values()),
        **{f"{kind}_weight_bytes": size for kind, size in kinds.items()},
        weight_bytes_per_gpu=per_gpu,
        kv_bytes_per_token=-(-block // BLOCK_TOKENS),
        kv_bytes_per_block=block,
        state_bytes_per_sequence=state,
        stored_state_bytes_per_sequence=stored_state,
        cache_bytes_per_sequence=sequence,
        free_bytes_per_gpu=free,
        sequences_per_gpu=sequences,
        sequences=sequences * num_gpus,
        longest_sequence_tokens=min(alone, longest),
        flops_per_decode_token=2 * _active(decode) + _attention_flops(config, context_len, config.num_hidden_layers),
        flops_per_prefill_token=2 * _active(prefill) + _attention_flops(config, context_len, config.num_encoder_layers),
        weight_bytes_read_per_decode_token=round(sum(_stored_bytes(spec) * share for spec, share in decode)),
    )


# ------------------------------------------------------------------ weights


def _kind(spec: ParameterSpec) -> str:
    top = spec.name.split(".")[0]
    if top == "mtp":
        return "draft"
    if top in ("vision", "aligner") or top.startswith("image_"):
        return "vision"
    if spec.name in ("embed.weight", "head.weight"):
        return "embedding"
    if spec.is_expert_stack:
        return "routed_expert"
    if spec.storage == "fp8_rows":
        return "engram_table"
    return "attention" if ".attn." in spec.name else "other"


def _stored_bytes(spec: ParameterSpec) -> int:
    count = spec.shape[0] if spec.is_expert_stack else 1
    one = ParameterSpec(spec.name, (1, *spec.shape[1:]), spec.storage) if spec.is_expert_stack else spec
    return count * sum(tensor.num_bytes for tensor in stored_tensors(one))


def _bytes_on_one_gpu(spec: ParameterSpec, num_gpus: int) -> int:
    """Of the GPU that has most: experts and table rows are sharded, everything else is replicated."""
    if not spec.is_expert_stack and spec.storage != "fp8_rows":
        return _stored_bytes(spec)
    rows = -(-spec.shape[0] // num_gpus)
    return _stored_bytes(ParameterSpec(spec.name, (rows, *spec.shape[1:]), spec.storage))


def _active_share(spec: ParameterSpec, config: ModelConfig) -> float:
    """Part of a parameter that one decoded token multiplies with; rows that are merely looked up count as none."""
    if _kind(spec) in ("draft", "vision", "engram_table") or spec.name == "embed.weight":
        return 0.0
    return config.num_experts_per_tok / config.n_routed_experts if spec.is_expert_stack else 1.0


def _active(parameters: list[tuple[ParameterSpec, float]]) -> int:
    return round(sum(prod(spec.shape) * share for spec, share in parameters))


def _runs_in_prefill(spec: ParameterSpec, config: ModelConfig) -> bool:
    """The encoder layers, and of the first decoder layer what makes the compressed KV (spec: model, section 5, CED)."""
    if not spec.name.startswith("layers."):
        return False
    layer_id, rest = spec.name.removeprefix("layers.").split(".", 1)
    if int(layer_id) < config.num_encoder_layers:
        return True
    makes_kv = ("attn.compressor.", "attn.indexer.wk.", "attn.indexer.k_norm.", "attn_norm.", "hc_attn_")
    return int(layer_id) == config.num_encoder_layers and rest.startswith(makes_kv)


# ------------------------------------------------------------------ caches and attention


def _state_bytes(config: ModelConfig, kv_dtype: str) -> tuple[int, int]:
    """(whole slot, stored region) of the state cache, from its own allocator."""
    state = StateCache.allocate(config, 1, CACHE_DTYPES[kv_dtype], torch.float32, "meta")
    return state.storage.shape[1], state.stored_bytes


def _attention_flops(config: ModelConfig, context_len: int, num_layers: int) -> int:
    """Scores and weighted sums over the window and the selected entries, plus the indexer's scores; one token."""
    flops = 0
    for layer in config.layers[:num_layers]:
        keys = min(config.sliding_window, context_len)
        if layer.compress_ratio:
            entries = context_len // layer.compress_ratio
            keys += min(config.index_topk, entries)
            if layer.reads_candidates:
                entries = min(entries, config.candidate_topk_blocks * config.candidate_block_size)
            if layer.is_index_source:
                flops += 2 * entries * config.index_n_heads * config.index_head_dim
        flops += 4 * keys * config.num_attention_heads * config.head_dim
    return flops


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"plan: {name} is {value!r}, allowed: {allowed}")
