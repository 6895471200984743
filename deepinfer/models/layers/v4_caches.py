"""Caches of DeepSeek-V4: the paged block cache with an own entry list for every compressing layer, and the state.

Float formats only: the released FP8 rows and FP4 index keys of V4 are not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.config.model_v4 import AttentionKind, LayerPlanV4, ModelConfigV4
from deepinfer.models.caches import BlockCache


@dataclass
class StateCacheV4:
    """Everything of fixed size per sequence, by layer; slot 0 takes padding.

    rings[l]: [num_slots, sliding_window, head_dim]. carry[l] and index_carry[l]: [num_slots, span, 2, series, dim], the
    inputs (kv, gate) of the latest tokens of a compressor and of its indexer's compressor, at least float32.
    """

    rings: list[Tensor]
    carry: dict[int, Tensor] = field(default_factory=dict)
    index_carry: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class CachesV4:
    """Both caches of one model instance."""

    blocks: BlockCache
    state: StateCacheV4


def entry_values(plan: LayerPlanV4, config: ModelConfigV4) -> int:
    """Values that one compressed entry of a layer takes."""
    return config.head_dim + (config.index_head_dim if plan.kind is AttentionKind.SPARSE else 0)


def block_bytes(config: ModelConfigV4, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block of tokens takes in all layers."""
    plans = [plan for plan in config.layers if plan.compress_ratio]
    return sum(block_size // plan.compress_ratio * entry_values(plan, config) for plan in plans) * dtype.itemsize


def slot_bytes(config: ModelConfigV4, dtype: torch.dtype, compute: torch.dtype) -> int:
    """Bytes of one sequence: rings of `dtype`, carries of `compute`."""
    rings = config.num_hidden_layers * config.sliding_window * config.head_dim * dtype.itemsize
    plans = [plan for plan in config.layers if plan.compress_ratio]
    carries = sum(plan.group_span * 2 * plan.num_series * entry_values(plan, config) for plan in plans)
    return rings + carries * compute.itemsize


def allocate_caches(
    config: ModelConfigV4,
    num_blocks: int,
    block_size: int,
    num_slots: int,
    dtype: torch.dtype,
    compute: torch.dtype,
    device: torch.device,
) -> CachesV4:
    """Zeroed caches of float `dtype`; the carries are of `compute`.

    Raises:
        ValueError: block_size does not hold whole groups, or `dtype` is a packed format.
    """
    if not dtype.is_floating_point:
        raise ValueError("kv_cache_dtype is 'fp8', allowed for deepseek_v4: 'fp32', 'bf16', 'fp64'")

    def zeros(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.zeros(*shape, dtype=like, device=device)

    blocks = BlockCache(block_size)
    state = StateCacheV4([zeros(num_slots, config.sliding_window, config.head_dim) for _ in config.layers])
    for plan in config.layers:
        if not plan.compress_ratio:
            continue
        if block_size % plan.compress_ratio:
            raise ValueError(f"block_size is {block_size}, allowed: a multiple of the ratio {plan.compress_ratio}")
        layer, entries = plan.layer_id, block_size // plan.compress_ratio
        carry = (num_slots, plan.group_span, 2, plan.num_series)
        blocks.latents[layer] = zeros(num_blocks, entries, config.head_dim)
        state.carry[layer] = zeros(*carry, config.head_dim, like=compute)
        if plan.kind is AttentionKind.SPARSE:
            blocks.index_keys[layer] = zeros(num_blocks, entries, config.index_head_dim)
            state.index_carry[layer] = zeros(*carry, config.index_head_dim, like=compute)
    return CachesV4(blocks, state)
