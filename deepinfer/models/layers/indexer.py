"""Lightning indexer: which compressed positions each row attends to (spec: model, section 5)."""

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
from deepinfer.models.layers.linear import quantized_linear
from deepinfer.models.layers.step import StepMetadata


@dataclass
class Sharing:
    """What layers hand to later layers within one step."""

    selected_slots: Tensor | None = None  # int32 [N, at most index_topk] physical slots of the latest index source
    candidates: Tensor | None = None  # bool [N, blocks] kept by the candidate source


@dataclass(frozen=True)
class Indexer:
    """Weights of an index source layer (Full or Reindex)."""

    plan: LayerPlan
    wq_b: Tensor | Fp8Weight  # [Hi * di, q_lora_rank]
    weights_proj: Tensor  # [Hi, D], the constant di^-0.5 * Hi^-0.5 folded in at run time

    def forward(
        self,
        y: Tensor,
        qr: Tensor,
        config: ModelConfig,
        step: StepMetadata,
        caches: Caches,
        sharing: Sharing,
        quantize_activations: bool,
    ) -> None:
        """Select for this layer and the Reuse layers after it. y [N, D], qr [N, q_lora_rank]."""
        keys = caches.blocks.index_keys[self.plan.kv_owner]
        rotation = step.rotations[True]
        iq = quantized_linear(qr, self.wq_b, quantize_activations).unflatten(-1, (config.index_n_heads, -1))
        iq = ops.rope(iq, rotation.cos, rotation.sin, False)
        if keys.dtype == torch.uint8:
            iq = ops.round_trip_rows(iq, keys, RowFormat.MXFP4)
        weights = ops.linear(y, self.weights_proj) * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
        visible = step.compression[self.plan.compress_ratio].visible
        scores = ops.index_scores(iq, weights, keys, step.inputs.block_tables, step.sequence_of_row, visible)
        if self.plan.writes_candidates:
            sharing.candidates = self._candidates(scores, visible, config)
        if self.plan.reads_candidates and sharing.candidates is not None:
            scores = ops.mask_to_candidates(scores, sharing.candidates, config.candidate_block_size)
        # A short context has fewer positions than a selection may have; one column stays, for the kernels' sake.
        positions = ops.top_k_positions(scores, min(config.index_topk, max(scores.shape[1], 1)))
        sharing.selected_slots = step.cache_slots(positions, keys.shape[1])

    @staticmethod
    def _candidates(scores: Tensor, visible: Tensor, config: ModelConfig) -> Tensor | None:
        """None while every block would be kept: the restriction does nothing below topk_blocks * block_size."""
        if scores.shape[1] <= config.candidate_topk_blocks * config.candidate_block_size:
            return None
        return ops.candidate_blocks(scores, visible, config.candidate_block_size, config.candidate_topk_blocks)
