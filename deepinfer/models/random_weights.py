"""Random weights with which every mechanism bites: for tests and synthetic checkpoints (spec: model, section 10).

Norms away from 1, token-dependent mHC mixes, sinks, gate biases that change the selection, and matrices scaled so that
activations stay O(1). Each tensor (each expert) has its own seed, so that a stream and a whole model agree.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.models.checkpoint_format import BLOCK, ParameterSpec, Shape, Weights, in_memory_dtype, parameter_specs
from deepinfer.models.loader import StoredTensor, is_engram_table, is_routed_expert, is_text

_ROWS_AT_ONCE = 1 << 18  # float32 rows of an Engram table


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


def random_stored_weights(
    config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Weights, dict[str, StoredTensor]]:
    """A text model made on the device at once: Engram tables packed, routed experts in FP4, the rest in `dtype`.

    For speed, not for equality: the values differ from `random_weights`, their sizes do not.
    """
    weights: Weights = {}
    experts: dict[str, StoredTensor] = {}
    for name, spec in parameter_specs(config).items():
        generator = _generator(seed, name, device)
        if not is_text(name):
            continue
        if is_routed_expert(name):
            experts[name] = _random_fp4(spec.shape, generator)
        elif is_engram_table(name):
            weights[name] = _random_packed_rows(spec.shape, generator)
        else:
            weights[name] = _draw(name, spec.shape, config, generator).to(in_memory_dtype(spec.storage, dtype))
    return weights, experts


def _random_fp4(shape: Shape, generator: torch.Generator) -> StoredTensor:
    """Uniform E2M1 codes, whose root mean square is 2.9, under one scale that makes it about columns ** -0.5."""
    *rows, columns = shape
    values = torch.empty((*rows, columns // 2), dtype=torch.uint8, device=generator.device)
    values.random_(0, 256, generator=generator)
    exponent = round(math.log2(columns**-0.5 / 2.9))
    scale = torch.full((*rows, columns // BLOCK), 127 + exponent, dtype=torch.uint8, device=generator.device)
    return StoredTensor("fp4", values, scale)


def _random_packed_rows(shape: Shape, generator: torch.Generator) -> Tensor:
    """Normal values as FP8 cache rows of scale 1, like `load_packed_tables`: uint8 [1, rows, dim * 33 / 32]."""
    rows, dim = shape
    packed = torch.full((1, rows, dim + dim // BLOCK), 127, dtype=torch.uint8, device=generator.device)
    for start in range(0, rows, _ROWS_AT_ONCE):
        chunk = torch.empty((min(_ROWS_AT_ONCE, rows - start), dim), device=generator.device)
        values = chunk.normal_(generator=generator).to(torch.float8_e4m3fn)
        packed[0, start : start + len(chunk), :dim] = values.view(torch.uint8)
    return packed


def _generator(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed((seed << 32) | zlib.crc32(name.encode()))


def _draw(name: str, shape: Shape, config: ModelConfig, generator: torch.Generator) -> Tensor:
    if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", ".q_weight", ".k_weight")):
        return torch.empty(shape, device=generator.device).uniform_(0.5, 1.5, generator=generator)
    if name.endswith("_scale"):  # mHC: near 1, so that the mixes depend on the token
        return torch.empty(shape, device=generator.device).uniform_(0.8, 1.2, generator=generator)
    normal = torch.empty(shape, device=generator.device).normal_(generator=generator)
    if name.endswith((".gate.bias", ".gate.bias_vl")):  # scores are about 0.8 +- 0.3
        return normal * 0.2
    if name.endswith("_base"):
        return normal * 0.5
    if name.endswith(".bias"):
        return normal * 0.1
    if name.endswith(("embed.weight", "attn_sink")) or len(shape) == 1:
        return normal
    return normal * shape[-1] ** -0.5
