"""What the throughput benchmark runs: two models of one shape, and the requests that both get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.config.model import ModelConfig, RopeScaling

VOCAB_SIZE = 8192
COMPRESSED_VOCAB_SIZE = 6000

# What both models have in common; the weights are random, which does not change the work.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 384,
    "num_hidden_layers": 10,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "head_dim": 128,
    "q_lora_rank": 192,
    "o_lora_rank": 96,
    "o_groups": 4,
    "n_routed_experts": 24,
    "num_experts_per_tok": 4,
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 128,
    "sliding_window": 128,
    "max_position_embeddings": 4096,
}
ROPE_DIM = 32


def deepinfer_config() -> ModelConfig:
    """DeepSeek-V4.1: one window layer, two ratio-2 sources, one ratio-1 source with two reindex layers, two Engrams."""
    return ModelConfig(
        **SHAPE,
        qk_rope_head_dim=ROPE_DIM,
        compress_ratios=(0, 2, 2, 2, 2, 1, 1, 1, 1, 1),
        kv_source_layer_ids=(1, 3, 5),
        index_source_layer_ids=(1, 3, 5, 7, 9),
        candidate_source_layer_id=5,
        candidate_topk_blocks=64,
        candidate_block_size=8,
        rope_scaling=RopeScaling(factor=16.0, original_max_position_embeddings=2048),
        engram_layer_ids=(1, 3),
        engram_max_ngram_size=3,
        engram_n_heads=2,
        engram_head_dim=64,
        engram_vocab_size=2003,
        engram_num_embeddings=(8058, 8184),
        engram_compressed_vocab_size=COMPRESSED_VOCAB_SIZE,
        num_nextn_predict_layers=0,
        image_token_id=VOCAB_SIZE - 1,
    )


def transformers_config() -> Any:
    """DeepSeek-V4 of `transformers` in the same shape: one window layer, nine layers of compressed sparse attention."""
    from transformers import DeepseekV4Config

    layers = SHAPE["num_hidden_layers"]
    return DeepseekV4Config(
        **SHAPE,
        partial_rotary_factor=ROPE_DIM / SHAPE["head_dim"],
        layer_types=["sliding_attention"] + ["compressed_sparse_attention"] * (layers - 1),
        mlp_layer_types=["moe"] * layers,
        num_nextn_predict_layers=0,
        pad_token_id=2,
    )


@dataclass(frozen=True)
class Workload:
    """Requests that arrive together: token ids in, a fixed number of greedy tokens out (end-of-sequence ignored)."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def workload(name: str, seed: int = 0) -> Workload:
    """One of `WORKLOADS`; the same seed gives the same requests in every process."""
    requests, prompt_lens, output_lens = WORKLOADS[name]
    draw = np.random.default_rng(seed)
    prompts = [
        draw.integers(3, VOCAB_SIZE - 1, length).tolist()
        for length in draw.integers(prompt_lens[0], prompt_lens[1] + 1, requests)
    ]
    return Workload(name, prompts, draw.integers(output_lens[0], output_lens[1] + 1, requests).tolist())


# name -> requests, (shortest, longest) prompt, (fewest, most) output tokens
WORKLOADS = {
    "batch1": (1, (128, 128), (128, 128)),
    "mixed32": (32, (16, 512), (16, 256)),
    "quick-batch1": (1, (16, 16), (8, 8)),
    "quick-mixed": (4, (4, 24), (2, 8)),
}
