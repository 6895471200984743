"""Mixture of experts of DeepSeek-V4: the first layers choose experts by token id (spec: model, section 12)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config.model_v4 import ModelConfigV4
from deepinfer.kernels import ops


@dataclass(frozen=True)
class MoEV4:
    """Weights of one layer's feed-forward; either `gate_bias` or `experts_of_token` is set."""

    gate: Tensor  # [E, D], at least float32
    gate_bias: Tensor | None  # [E], steers the choice only
    experts_of_token: Tensor | None  # int64 [vocab, k], the fixed choice of a hash layer
    w13: Tensor  # [E, 2I, D] = [w1 | w3]
    w2: Tensor  # [E, D, I]
    shared_w13: Tensor  # [2I, D]
    shared_w2: Tensor  # [D, I]

    def forward(self, y: Tensor, token_ids: Tensor, config: ModelConfigV4) -> Tensor:
        """y [N, D], token_ids int64 [N] -> [N, D]; routed sum and shared expert meet in at least float32."""
        logits = ops.linear(y.to(self.gate.dtype), self.gate)
        if self.experts_of_token is not None:
            chosen, gates = hash_gate(logits, self.experts_of_token[token_ids], config.routed_scaling_factor)
        else:
            chosen, gates = ops.moe_gate(
                logits, self.gate_bias, config.num_experts_per_tok, config.norm_topk_prob, config.routed_scaling_factor
            )
        routed = ops.moe_experts(y, chosen, gates, self.w13, self.w2, config.swiglu_limit, False)
        z = ops.swiglu(ops.linear(y, self.shared_w13), config.swiglu_limit)
        return (routed + ops.linear(z, self.shared_w2)).to(y.dtype)


def hash_gate(logits: Tensor, chosen: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Weights of experts that the token id chose. logits [N, E], chosen int64 [N, k] -> chosen int32, gates [N, k]."""
    gates = F.softplus(logits).sqrt().gather(-1, chosen)
    gates = gates / (gates.sum(-1, keepdim=True) + 1e-20) * scaling
    return chosen.to(torch.int32), gates
