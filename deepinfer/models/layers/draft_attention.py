"""Attention of a draft stage: its window ring over injected target features, and the block itself (spec: model, 8).

The ring holds the context rows of committed tokens. A draft writes the keys of its B block rows behind them, at the
positions that the drafted tokens would have; the ring has room for that beside the window, and the rows of the tokens
that are verified there overwrite them before anything reads them again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.kernels import ops
from deepinfer.kernels.ops import RowFormat
from deepinfer.models.layers.attention import Attention, grouped_projection
from deepinfer.models.layers.linear import StoredFp8, quantized_linear
from deepinfer.models.layers.step import Rotation


@dataclass(frozen=True)
class BlockPlan:
    """Where the S * B rows of a draft block are, flattened in sequence order."""

    rotation: Rotation
    slots: Tensor  # int32 [S * B, W + B] ring slots that a row sees, -1 before the sequence's first token
    stored_slots: Tensor  # int64 [S * B] ring slots that the rows' own keys go to

    @classmethod
    def of(
        cls,
        last_positions: Tensor,
        state_slots: Tensor,
        block_size: int,
        window: int,
        ring_size: int,
        frequencies: Tensor,
        wide: torch.dtype,
    ) -> BlockPlan:
        """Rows at last_positions + 1, ..., + block_size. last_positions int64 [S], state_slots int [S]."""
        device = last_positions.device
        base = state_slots.long().unsqueeze(1) * ring_size
        wanted = last_positions.unsqueeze(1) + torch.arange(1 - window, block_size + 1, device=device)  # [S, W + B]
        slots = base + wanted % ring_size
        stored = slots[:, window:]
        visible = slots.masked_fill(wanted < 0, -1).to(torch.int32)
        rows = visible.unsqueeze(1).expand(-1, block_size, -1).reshape(-1, window + block_size)
        rotation = Rotation.at(wanted[:, window:].flatten(), frequencies, wide)
        return cls(rotation, rows, stored.flatten())


def draft_attention(
    attention: Attention, y: Tensor, config: ModelConfig, ring: Tensor, plan: BlockPlan, quantize_activations: bool
) -> Tensor:
    """y [S * B, D], mixed and normed -> [S * B, D]. Every row sees the window and the whole block."""
    qr, kv = quantized_linear(y, attention.wq_a_wkv, quantize_activations).split(
        (config.q_lora_rank, config.head_dim), -1
    )
    qr = ops.rms_norm(qr, attention.q_norm, config.rms_norm_eps)
    q = quantized_linear(qr, attention.wq_b, quantize_activations).unflatten(-1, (config.num_attention_heads, -1))
    cos, sin = plan.rotation.cos, plan.rotation.sin
    q = ops.rope(q, cos, sin, False)
    ops.store_rows(ring, plan.stored_slots, window_rows(attention, kv, config, plan.rotation), RowFormat.FP8)
    o = ops.sparse_attention(q, ring, plan.slots, None, None, attention.sink, config.head_dim**-0.5)
    o = ops.rope(o, cos, sin, True)
    return quantized_linear(grouped_projection(o, attention.wo_a), attention.wo_b, quantize_activations)


def store_context(
    attention: Attention,
    wkv: Tensor | StoredFp8,
    main_x: Tensor,
    config: ModelConfig,
    ring: Tensor,
    slots: Tensor,
    rotation: Rotation,
    quantize_activations: bool,
) -> None:
    """Context rows of committed tokens: main_x [N, D] bypasses attn_norm and mHC; wkv [d, D], slots int64 [N]."""
    kv = quantized_linear(main_x, wkv, quantize_activations)
    ops.store_rows(ring, slots, window_rows(attention, kv, config, rotation), RowFormat.FP8)


def window_rows(attention: Attention, kv: Tensor, config: ModelConfig, rotation: Rotation) -> Tensor:
    """Normed and rotated window rows of kv [N, d]."""
    return ops.norm_rope(kv, attention.kv_norm, config.rms_norm_eps, rotation.cos, rotation.sin)
