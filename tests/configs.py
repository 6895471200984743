"""The tiny V4.1 configuration that tests share (spec: model, section 10) and its synthetic token map.

Every mechanism is on and bites within 64-128 tokens: two ratio-2 KV owners, one ratio-1 owner, reindex and reuse
layers, candidate blocks that restrict, two Engram layers and, when asked for, two draft layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer.config.model import ModelConfig
from deepinfer.config.parts import RopeScaling, VisionConfig

TINY_VISION = VisionConfig(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    intermediate_size=96,
    patch_size=4,
    downsample_ratio=3,
    max_image_tokens=32,
    min_pixels=144,
)


def tiny_config(num_nextn_predict_layers: int = 0, **overrides: Any) -> ModelConfig:
    """About 3.4M parameters. `num_nextn_predict_layers` is 0 (no draft head) or 2; any field may be overridden."""
    values: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 10,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "compress_ratios": (0, 2, 2, 2, 2, 1, 1, 1, 1, 1, *[0] * num_nextn_predict_layers),
        "kv_source_layer_ids": (1, 3, 5),
        "index_source_layer_ids": (1, 3, 5, 7, 9),
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 8,
        "sliding_window": 16,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 4,
        "max_position_embeddings": 1024,
        "rope_scaling": RopeScaling(factor=16.0, original_max_position_embeddings=64),
        "engram_layer_ids": (1, 3),
        "engram_num_embeddings": (272, 348),
        "engram_max_ngram_size": 3,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_vocab_size": 61,
        "engram_compressed_vocab_size": 300,
        "num_nextn_predict_layers": num_nextn_predict_layers,
        "dspark_block_size": 3,
        "dspark_noise_token_id": 510,
        "dspark_target_layer_ids": (8, 9) if num_nextn_predict_layers else (),
        "dspark_markov_rank": 16,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
        "image_token_id": 511,
    }
    return ModelConfig(**{**values, **overrides})


def tiny_token_map() -> np.ndarray:
    """Compressed token map of the tiny vocabulary: int32 [512], ids 0..299 in first-seen order, 212 of them shared."""
    token_ids = np.arange(512)
    return np.where(token_ids < 300, token_ids, (token_ids * 7) % 300).astype(np.int32)
