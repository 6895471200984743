"""Mixture of experts with a sqrt-softplus gate and one shared expert (spec: model, section 6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.kernels import ops
from deepinfer.kernels.deep_gemm.fp4_weights import ExpertWeights
from deepinfer.kernels.deep_gemm.linear import Fp8Weight
from deepinfer.kernels.deep_gemm.moe import routed_experts
from deepinfer.models.layers.linear import quantized_linear, wide_linear


@dataclass(frozen=True)
class Experts:
    """Routed experts as plain values."""

    w13: Tensor  # [E, 2I, D] = [w1 | w3]
    w2: Tensor  # [E, D, I]

    def forward(
        self, y: Tensor, chosen: Tensor, gates: Tensor, limit: float, quantize_activations: bool, shared: Tensor
    ) -> Tensor:
        """y [N, D], chosen int32 [N, k], gates [N, k]; shared [N, D], what the shared expert makes of y -> [N, D]."""
        routed = ops.moe_experts(y, chosen, gates, self.w13, self.w2, limit, quantize_activations)
        return torch.add(routed, shared, out=torch.empty_like(y))  # added in the wider dtype, rounded once


@dataclass(frozen=True)
class StoredExperts:
    """Routed experts as the checkpoint holds them: FP4 pairs and E8M0 scales, uint8."""

    w13: Tensor  # [E, 2I, D / 2]
    w13_scale: Tensor  # [E, 2I, D / 32]
    w2: Tensor  # [E, D, I / 2]
    w2_scale: Tensor  # [E, D, I / 32]

    def forward(
        self, y: Tensor, chosen: Tensor, gates: Tensor, limit: float, quantize_activations: bool, shared: Tensor
    ) -> Tensor:
        """As `Experts.forward`."""
        weights = self.w13, self.w13_scale, self.w2, self.w2_scale
        routed = ops.moe_experts_fp4(y, chosen, gates, *weights, limit, quantize_activations)
        return torch.add(routed, shared, out=torch.empty_like(y))


@dataclass(frozen=True)
class ArrangedExperts:
    """Routed experts in FP4 in the order of a Hopper kernel, which always rounds the activations (models/fp8.py)."""

    w13: ExpertWeights
    w2: ExpertWeights

    def forward(
        self, y: Tensor, chosen: Tensor, gates: Tensor, limit: float, quantize_activations: bool, shared: Tensor
    ) -> Tensor:
        """As `Experts.forward`."""
        return routed_experts(y, chosen, gates, self.w13, self.w2, limit, shared)


@dataclass(frozen=True)
class MoE:
    """Weights of one layer's feed-forward."""

    gate: Tensor  # [E, D], widened
    gate_bias: Tensor  # [E], steers the choice of text tokens
    gate_bias_vl: Tensor  # [E], the same for every position of an image span
    experts: Experts | StoredExperts | ArrangedExperts
    shared_w13: Tensor | Fp8Weight  # [2I, D]
    shared_w2: Tensor | Fp8Weight  # [D, I]

    def forward(
        self,
        y: Tensor,
        is_image: Tensor | None,
        config: ModelConfig,
        quantize_activations: bool,
        chosen_experts: list[Tensor] | None = None,
    ) -> Tensor:
        """y [N, D] -> [N, D]; routed sum and shared expert meet in at least float32.

        is_image: bool [N, 1], rows of image spans, which have a bias of their own; None: there are none.
        The chosen experts, int32 [N, k], are appended to `chosen_experts`.
        """
        logits = wide_linear(y, self.gate)
        bias = self.gate_bias
        if is_image is not None:
            bias = torch.where(is_image, self.gate_bias_vl, bias)
        chosen, gates = ops.moe_gate(
            logits, bias, config.num_experts_per_tok, config.norm_topk_prob, config.routed_scaling_factor
        )
        if chosen_experts is not None:
            chosen_experts.append(chosen)
        z = ops.swiglu(quantized_linear(y, self.shared_w13, quantize_activations), config.swiglu_limit)
        shared = quantized_linear(z, self.shared_w2, quantize_activations)
        return self.experts.forward(y, chosen, gates, config.swiglu_limit, quantize_activations, shared)
