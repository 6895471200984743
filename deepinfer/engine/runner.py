"""ModelRunner: the model with its caches; runs one step."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from deepinfer.config.engine import EngineConfig
from deepinfer.config.reading import read_model_config
from deepinfer.engine.memory import check_caches_fit
from deepinfer.models.caches import CACHE_DTYPES
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.inputs import ModelInputs
from deepinfer.models.registry import Model, load_model
from deepinfer.observability.flops import FlopsEstimator

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """Arithmetic of the model: "auto" is BF16 on a GPU, and FP32 on a CPU, whose BF16 is several times slower."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return torch.bfloat16 if torch.device(config.device).type == "cuda" else torch.float32


def check_truncation(model: Model, config: EngineConfig) -> None:
    """Raise ValueError if YoCo truncation is asked of a model without it, or keeps too little to decode from.

    A decode step reads a window that ends up to max_backtracking_tokens before the end of the prompt.
    """
    mode, keep = config.yoco_prefill_truncation_mode, config.yoco_prefill_keep_tokens
    if mode == "off":
        return
    if model.yoco_window is None:
        raise ValueError(f"yoco_prefill_truncation_mode must be off for this model, got {mode!r}")
    window, needed = model.yoco_window
    backtracking = max(needed, config.max_backtracking_tokens or 0)
    if keep is None or keep < window + backtracking:
        raise ValueError(
            f"yoco_prefill_keep_tokens must be at least {window + backtracking} (sliding_window {window} + "
            f"max_backtracking_tokens {backtracking}) in mode {mode!r}, got {keep}"
        )


def check_max_model_len(config: EngineConfig, limit: int) -> None:
    """Raise ValueError if longer sequences are asked for than the model has positions for."""
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(f"max_model_len must be at most {limit}, the model's own limit, got {config.max_model_len}")


class ModelRunner:
    """Owns the caches. `num_blocks` counts the null block."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        check_truncation(model, config)
        self.model = model
        self.flops = FlopsEstimator(model.config) if isinstance(model, DeepseekV41) else None
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_position_embeddings
        self.eos_token_ids = model.eos_token_ids
        automatic = config.kv_cache_dtype == "auto"
        cache_dtype = model.default_cache_dtype if automatic else CACHE_DTYPES[config.kv_cache_dtype]
        check_max_model_len(config, self.max_model_len)
        longest = config.max_model_len or self.max_model_len
        block_bytes = model.block_bytes(config.block_size, cache_dtype)
        self.num_blocks = config.resolve_num_blocks(block_bytes, longest)
        slot_bytes = model.slot_bytes(cache_dtype, config.max_backtracking_tokens or 0)
        check_caches_fit(config, self.num_blocks, block_bytes, slot_bytes)
        self.caches = model.allocate_caches(
            self.num_blocks,
            config.block_size,
            config.max_num_seqs + 1,
            cache_dtype,
            config.max_backtracking_tokens or 0,
        )

    @classmethod
    def from_checkpoint(cls, path: str | Path, config: EngineConfig) -> ModelRunner:
        """Load the checkpoint folder at `path`. Raises ValueError naming what is wrong with it."""
        check_max_model_len(config, read_model_config(path).max_position_embeddings)  # before minutes of loading
        return cls(load_model(path, compute_dtype(config), config.device, config.quantize_activations), config)

    def run(self, inputs: ModelInputs) -> Tensor:
        """Logits float32 [R, vocab_size] of inputs.logits_rows."""
        return self.model.forward(inputs, self.caches).float()
