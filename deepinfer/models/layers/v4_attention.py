"""Attention of DeepSeek-V4: window and compressed entries in one softmax (spec: model, section 12).

Differs from V4.1's: an unweighted RMS norm on every query head, and a compressor (and indexer) in every layer that
reads compressed KV. The Hadamard rotation of the released index keys and queries leaves their products as they are, so
it is left out: it matters only where they are rounded to FP4.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.config.model_v4 import LayerPlanV4, ModelConfigV4
from deepinfer.kernels import ops
from deepinfer.models.layers.attention import attend, grouped_projection
from deepinfer.models.layers.v4_caches import CachesV4
from deepinfer.models.layers.v4_compressor import CompressorV4
from deepinfer.models.layers.v4_step import StepMetadataV4


@dataclass(frozen=True)
class IndexerV4:
    """Selects entries for a sparse layer, with index keys from a compressor of its own."""

    layer_id: int
    compressor: CompressorV4
    wq_b: Tensor  # [Hi * di, q_lora_rank]
    weights_proj: Tensor  # [Hi, D]

    def forward(
        self, y: Tensor, qr: Tensor, config: ModelConfigV4, step: StepMetadataV4, caches: CachesV4, plan: LayerPlanV4
    ) -> Tensor | None:
        """int32 [N, K] slots of the selected entries, K = min(index_topk, visible); None if no row sees any."""
        groups, rotation = step.groups[plan.kind], step.rotations[True]
        keys = caches.blocks.index_keys[self.layer_id]
        self.compressor.forward(y, step.inputs.positions, groups, caches.state.index_carry[self.layer_id], keys)
        iq = ops.linear(qr, self.wq_b).unflatten(-1, (config.index_n_heads, -1))
        iq = ops.rope(iq, rotation.cos, rotation.sin, False)
        weights = ops.linear(y, self.weights_proj) * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
        scores = ops.index_scores(iq, weights, keys, step.inputs.block_tables, step.sequence_of_row, groups.visible)
        if scores.shape[1] == 0:
            return None
        positions = ops.top_k_positions(scores, min(config.index_topk, scores.shape[1]))
        return ops.entry_slots(positions, step.inputs.block_tables, step.sequence_of_row, keys.shape[1])


@dataclass(frozen=True)
class AttentionV4:
    """Weights of one layer's attention."""

    plan: LayerPlanV4
    wq_a_wkv: Tensor  # [q_lora_rank + d, D]: both read the layer input
    q_norm: Tensor
    wq_b: Tensor  # [H * d, q_lora_rank]
    q_head_norm: Tensor  # [d] ones: the norm of a query head has no weight
    kv_norm: Tensor
    sink: Tensor  # [H]
    wo_a: Tensor  # [groups, o_lora_rank, H / groups * d]
    wo_b: Tensor  # [D, groups * o_lora_rank]
    compressor: CompressorV4 | None  # layers with compressed KV
    indexer: IndexerV4 | None  # sparse layers

    def forward(self, y: Tensor, config: ModelConfigV4, step: StepMetadataV4, caches: CachesV4) -> Tensor:
        """y [N, D], mixed and normed -> [N, D]."""
        plan, eps = self.plan, config.rms_norm_eps
        rotation = step.rotations[plan.compress_ratio > 0]
        qr, kv = ops.linear(y, self.wq_a_wkv).split((config.q_lora_rank, config.head_dim), -1)
        qr = ops.rms_norm(qr, self.q_norm, eps)
        q = ops.linear(qr, self.wq_b).unflatten(-1, (config.num_attention_heads, -1))
        q = ops.rms_norm(q, self.q_head_norm, eps)
        kv = ops.rms_norm(kv, self.kv_norm, eps)
        kv = ops.rope(kv.unsqueeze(1), rotation.cos, rotation.sin, False).squeeze(1)

        latents = selected = None
        if self.compressor is not None:
            groups = step.groups[plan.kind]
            entries = caches.blocks.latents[plan.layer_id]
            self.compressor.forward(y, step.inputs.positions, groups, caches.state.carry[plan.layer_id], entries)
            selected = groups.visible_slots
            if self.indexer is not None:
                selected = self.indexer.forward(y, qr, config, step, caches, plan)
            latents = entries if selected is not None and selected.shape[1] else None
        o = attend(q, kv, rotation, caches.state.rings[plan.layer_id], step.window, latents, selected, self.sink)
        return ops.linear(grouped_projection(o, self.wo_a), self.wo_b)
