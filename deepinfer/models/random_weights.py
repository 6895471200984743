"""Random weights with which every mechanism bites: for tests and synthetic checkpoints (spec: model, section 10).

Norms away from 1, token-dependent mHC mixes, sinks, gate biases that change the selection, and matrices scaled so that
activations stay O(1). Each tensor (each expert) has its own seed, so that a stream and a whole model agree.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.models.checkpoint_format import ParameterSpec, Shape, Weights, in_memory_dtype, parameter_specs


def random_weights(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Weights:
    """A whole in-memory model; FP32 tensors of the format stay FP32 when `dtype` is narrower."""
    return {
        name: random_parameter(spec, config, seed).to(in_memory_dtype(spec.storage, dtype))
        for name, spec in parameter_specs(config).items()
    }


def random_parameter(spec: ParameterSpec, config: ModelConfig, seed: int, expert: int | None = None) -> Tensor:
    """One parameter in float32; of a stacked parameter, all experts or the one asked for."""
    if not spec.is_expert_stack:
        return _draw(spec.name, spec.shape, config, _generator(seed, spec.name))
    experts = range(spec.shape[0]) if expert is None else [expert]
    drawn = [_draw(spec.name, spec.shape[1:], config, _generator(seed, f"{spec.name}.{e}")) for e in experts]
    return torch.stack(drawn) if expert is None else drawn[0]


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed((seed << 32) | zlib.crc32(name.encode()))


def _draw(name: str, shape: Shape, config: ModelConfig, generator: torch.Generator) -> Tensor:
    if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", ".q_weight", ".k_weight")):
        return torch.empty(shape).uniform_(0.5, 1.5, generator=generator)
    if name.endswith("_scale"):  # mHC: near 1, so that the mixes depend on the token
        return torch.empty(shape).uniform_(0.8, 1.2, generator=generator)
    normal = torch.empty(shape).normal_(generator=generator)
    if name.endswith((".gate.bias", ".gate.bias_vl")):  # scores are about 0.8 +- 0.3
        return normal * 0.2
    if name.endswith("_base"):
        return normal * 0.5
    if name.endswith(".bias"):
        return normal * 0.1
    if name.endswith(("embed.weight", "attn_sink")) or len(shape) == 1:
        return normal
    return normal * shape[-1] ** -0.5
