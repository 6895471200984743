"""Models to measure without a checkpoint: the layers of DeepSeek-V4.1-Flash, as many as fit, with random weights.

Random weights do not change the work, except that routing is more even than in a trained model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import ModelConfig, engram_primes
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import check_device, resolve_model
from deepinfer.engine.runner import ModelRunner, compute_dtype
from deepinfer.kernels import ops
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.plan import load_plan_config
from deepinfer.models.random_weights import random_stored_weights
from deepinfer.models.registry import Model, load_model, round_activations

ENGRAM_VOCAB_SIZE = 100_000  # instead of 16 million: 2 x 2.4 million rows, which still miss every cache


def v41_config(num_layers: int = 8, num_experts: int | None = None) -> ModelConfig:
    """DeepSeek-V4.1-Flash with fewer layers in the same proportions; 40 layers share as the released ones do.

    One layer in twenty sees its window alone, the rest of the first half reads ratio-2 KV with a source every sixth
    layer, the second half ratio-1 KV of its first layer, with an index source every fourth. Draft head and image tower
    are left out, Engram tables are smaller.
    """
    full = load_plan_config("DeepSeek-V4.1-Flash")
    if num_layers < 4 or num_layers % 2:
        raise ValueError(f"num_layers must be even and at least 4, got {num_layers}")
    half = num_layers // 2
    window_only = max(half // 10, 1)
    pooled_sources = tuple(range(window_only, half, 6))
    tables = (full.engram_max_ngram_size - 1) * full.engram_n_heads
    engram_layers = (window_only - 1, pooled_sources[-1])
    return replace(
        full,
        num_hidden_layers=num_layers,
        n_routed_experts=num_experts or full.n_routed_experts,
        compress_ratios=(0,) * window_only + (2,) * (half - window_only) + (1,) * half,
        kv_source_layer_ids=(*pooled_sources, half),
        index_source_layer_ids=(*pooled_sources, *range(half, num_layers, 4)),
        candidate_source_layer_id=half,
        engram_layer_ids=engram_layers,
        engram_vocab_size=ENGRAM_VOCAB_SIZE,
        engram_num_embeddings=tuple(map(sum, engram_primes(len(engram_layers), tables, ENGRAM_VOCAB_SIZE))),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        vision=None,
    )


def small_config(num_layers: int = 8, num_experts: int | None = None) -> ModelConfig:
    """The same layers, each a few thousand times smaller, to try a benchmark on a CPU."""
    tables = 2 * 2
    return replace(
        v41_config(num_layers, num_experts or 16),
        vocab_size=512,
        hidden_size=128,
        moe_intermediate_size=64,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=64,
        o_lora_rank=32,
        o_groups=2,
        num_experts_per_tok=2,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=64,
        candidate_topk_blocks=16,
        max_position_embeddings=65536,
        engram_max_ngram_size=3,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_vocab_size=101,
        engram_num_embeddings=tuple(map(sum, engram_primes(2, tables, 101))),
        engram_compressed_vocab_size=300,
        dspark_noise_token_id=0,
        image_token_id=511,
    )


SHAPES: dict[str, Callable[[int, int | None], ModelConfig]] = {"v41": v41_config, "v41-small": small_config}


def synthetic_config(shape: str, num_layers: int, num_experts: int | None = None) -> ModelConfig:
    """Config of one of SHAPES. Raises ValueError for another name or a number of layers that cannot be shared out."""
    if shape not in SHAPES:
        raise ValueError(f"synthetic must be one of {', '.join(SHAPES)}, got {shape!r}")
    return SHAPES[shape](num_layers, num_experts)


def synthetic_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    quantize_activations: bool | None = None,
) -> DeepseekV41:
    """Random weights made on the device; routed experts stay in FP4 where a kernel reads it.

    `quantize_activations`: as in EngineConfig, None: where the kernels multiply in FP8.
    """
    weights, experts = random_stored_weights(config, seed, dtype, device)
    token_map = torch.arange(config.vocab_size) % config.engram_compressed_vocab_size
    if ops.reads_fp4_experts(dtype, device) or torch.device(device).type in ops.moe_experts_fp4.backends:
        model = DeepseekV41(config, weights, token_map, stored_experts=experts)
        round_activations(model, quantize_activations)
        return model
    for name in list(experts):
        weights[name] = experts.pop(name).dequantize(dtype)
    return DeepseekV41(config, weights, token_map)


def benchmark_model(
    model: str, device: str, synthetic: str | None = None, num_layers: int = 8, num_experts: int | None = None
) -> Model:
    """A checkpoint by name or folder, or a synthetic model when `synthetic` names a shape.

    Raises ValueError naming what is not available.
    """
    check_device(device)
    dtype = compute_dtype(EngineConfig(device=device))
    if synthetic is None:
        return load_model(resolve_model(model), dtype, device, None)
    return synthetic_model(synthetic_config(synthetic, num_layers, num_experts), dtype, device)


def num_blocks(num_seqs: int, num_tokens: int) -> int:
    """Cache blocks for `num_seqs` sequences of `num_tokens` tokens each, and the null block."""
    return 1 + num_seqs * -(-num_tokens // EngineConfig.block_size)


def benchmark_engine(model: Model, config: EngineConfig) -> Engine:
    """An engine with caches of its own; no token ends a sequence."""
    return Engine(ModelRunner(model, config), config)
