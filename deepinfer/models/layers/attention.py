"""CSA2 attention of one layer: sliding window plus selected compressed KV in one softmax (spec: model, section 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.config.parts import LayerPlan
from deepinfer.kernels import ops
from deepinfer.kernels.deep_gemm.linear import Fp8Weight
from deepinfer.kernels.ops import RowFormat
from deepinfer.models.caches import Caches
from deepinfer.models.layers.compressor import Compressor
from deepinfer.models.layers.indexer import Indexer, Sharing
from deepinfer.models.layers.linear import StoredFp8, quantized_linear
from deepinfer.models.layers.step import Rotation, StepMetadata, WindowPlan


@dataclass(frozen=True)
class Attention:
    """Weights of one layer's attention."""

    plan: LayerPlan
    wq_a_wkv: Tensor | Fp8Weight  # [q_lora_rank + d, D]: both read the layer input
    q_norm: Tensor
    wq_b: Tensor | Fp8Weight  # [H * d, q_lora_rank]
    kv_norm: Tensor
    sink: Tensor  # [H]
    wo_a: Tensor | StoredFp8  # [groups, o_lora_rank, H / groups * d]; stored: rows of all groups
    wo_b: Tensor | Fp8Weight  # [D, groups * o_lora_rank]
    compressor: Compressor | None  # KV sources
    indexer: Indexer | None  # index sources

    def forward(
        self,
        y: Tensor,
        config: ModelConfig,
        step: StepMetadata,
        caches: Caches,
        sharing: Sharing,
        quantize_activations: bool,
    ) -> Tensor:
        """y [N, D], mixed and normed -> [N, D]. A KV source's compressor has run on this step's rows before."""
        plan, eps = self.plan, config.rms_norm_eps
        rotation = step.rotations[plan.compress_ratio > 0]
        qr_kv = quantized_linear(y, self.wq_a_wkv, quantize_activations)
        qr, kv = ops.norm_latents(qr_kv, self.q_norm, self.kv_norm, eps, rotation.cos, rotation.sin)
        q = quantized_linear(qr, self.wq_b, quantize_activations).unflatten(-1, (config.num_attention_heads, -1))

        if self.indexer is not None:
            self.indexer.forward(y, qr, config, step, caches, sharing, quantize_activations)
        latents = caches.blocks.latents[plan.kv_owner] if plan.compress_ratio else None
        selected = sharing.selected_slots if plan.compress_ratio else None
        ring = caches.state.rings[plan.layer_id]
        o = attend(q, kv, rotation, ring, step.window, latents, selected, self.sink)
        return quantized_linear(grouped_projection(o, self.wo_a), self.wo_b, quantize_activations)


def attend(
    q: Tensor,
    kv: Tensor,
    rotation: Rotation,
    ring: Tensor,
    window: WindowPlan,
    latents: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
) -> Tensor:
    """Window rows kv [N, d] go to the ring; attention reads the ring (decode) or a buffer (prefill).

    q [N, H, d] is not rotated yet, kv is; nor does the result [N, H, d] need to be rotated back.
    """
    dim = kv.shape[-1]
    turned = (q, rotation.cos, rotation.sin)
    scale = dim**-0.5
    if window.from_ring:
        ops.store_rows(ring, window.stored_slots, kv, RowFormat.FP8)
        return ops.rotated_attention(*turned, ring, window.slots, latents, selected, sink, scale)
    previous = ops.load_rows(ring, window.previous_slots, RowFormat.FP8, dim, kv.dtype)
    buffer = torch.cat((previous, ops.round_trip_rows(kv, ring, RowFormat.FP8))).unsqueeze(0)
    o = ops.rotated_attention(*turned, buffer, window.slots, latents, selected, sink, scale)
    ops.store_rows(ring, window.stored_slots, kv[window.stored_rows], RowFormat.FP8)
    return o


def grouped_projection(o: Tensor, wo_a: Tensor | StoredFp8) -> Tensor:
    """Block-diagonal output projection. o [N, H, d], wo_a [groups, rank, H / groups * d] -> [N, groups * rank]."""
    if isinstance(wo_a, StoredFp8):
        return ops.grouped_linear_fp8(o.reshape(len(o), -1, wo_a.values.shape[1]), wo_a.values, wo_a.scales)
    return ops.grouped_linear(o.reshape(len(o), *wo_a.shape[::2]), wo_a)
