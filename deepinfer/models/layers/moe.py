"""Mixture of experts with a sqrt-softplus gate and one shared expert (spec: model, section 6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.kernels import ops
from deepinfer.models.layers.linear import quantized_linear


@dataclass(frozen=True)
class MoE:
    """Weights of one layer's feed-forward."""

    gate: Tensor  # [E, D], at least float32
    gate_bias: Tensor  # [E], steers the choice of text tokens
    w13: Tensor  # [E, 2I, D] = [w1 | w3]
    w2: Tensor  # [E, D, I]
    shared_w13: Tensor  # [2I, D]
    shared_w2: Tensor  # [D, I]

    def forward(self, y: Tensor, config: ModelConfig, quantize_activations: bool) -> Tensor:
        """y [N, D] -> [N, D]; the routed sum and the shared expert meet in at least float32."""
        wide = torch.promote_types(y.dtype, torch.float32)
        logits = F.linear(y.to(wide), self.gate)
        chosen, gates = ops.moe_gate(
            logits, self.gate_bias, config.num_experts_per_tok, config.norm_topk_prob, config.routed_scaling_factor
        )
        routed = ops.moe_experts(y, chosen, gates, self.w13, self.w2, config.swiglu_limit, quantize_activations)
        z = ops.swiglu(quantized_linear(y, self.shared_w13, quantize_activations), config.swiglu_limit)
        shared = quantized_linear(z, self.shared_w2, quantize_activations)
        return (routed + shared).to(y.dtype)
