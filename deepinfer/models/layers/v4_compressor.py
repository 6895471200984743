"""Compressor of DeepSeek-V4: softmax-pooled groups with a position bias, overlapping in sparse layers (section 12)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import ops
from deepinfer.kernels.ops import RowFormat
from deepinfer.models.layers.v4_step import GroupPlan


@dataclass(frozen=True)
class CompressorV4:
    """Weights of one compressor; `dim` is head_dim, or index_head_dim for an indexer's."""

    wkv_wgate: Tensor  # [2 * series * dim, D], at least float32
    position_bias: Tensor  # [ratio, series * dim], added to the gate by the place of a token in its group
    norm: Tensor  # [dim]
    eps: float

    def forward(self, y: Tensor, positions: Tensor, plan: GroupPlan, carry: Tensor, cache: Tensor) -> None:
        """Write the entry of every group that this step completes, and carry the tokens that later groups need.

        y [N, D], carry [slots, span, 2, series, dim], cache [blocks, entries, dim].
        """
        inputs = self._inputs(y, positions, carry)
        if len(plan.members):
            pooled = self._pool(inputs, plan, carry).to(y.dtype)
            entry = ops.rms_norm(pooled, self.norm, self.eps)
            entry = ops.rope(entry.unsqueeze(1), plan.rotation.cos, plan.rotation.sin, False).squeeze(1)
            ops.store_rows(cache, plan.group_slots, entry, RowFormat.NVFP4)
        carry[plan.kept_slots, plan.kept_offsets] = inputs[plan.kept_rows]

    def _inputs(self, y: Tensor, positions: Tensor, carry: Tensor) -> Tensor:
        """(kv, gate) of every token, [N, 2, series, dim]."""
        kv, gate = ops.linear(y.to(carry.dtype), self.wkv_wgate).chunk(2, dim=-1)
        gate = gate + self.position_bias[positions % len(self.position_bias)]
        return torch.stack((kv, gate), dim=1).unflatten(-1, carry.shape[3:])

    @staticmethod
    def _pool(inputs: Tensor, plan: GroupPlan, carry: Tensor) -> Tensor:
        """Softmax over the tokens of each group, per channel -> [groups, dim]."""
        nothing = torch.zeros_like(inputs[:1])
        nothing[:, 1] = float("-inf")  # no token: weight 0
        num_groups, span = plan.members.shape
        tokens = torch.cat((inputs, nothing, carry[plan.state_slots].flatten(0, 1)))
        members = tokens[plan.members.flatten(), :, plan.series.repeat(num_groups)]  # [groups * span, 2, dim]
        kv, gate = members.unflatten(0, (num_groups, span)).unbind(2)
        return (kv * gate.softmax(dim=1)).sum(1)
