"""KV compression of a source layer: groups of tokens become one latent and one index key (spec: model, section 5)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.kernels import ops
from deepinfer.kernels.ops import RowFormat
from deepinfer.models.caches import Caches
from deepinfer.models.layers.linear import wide_linear
from deepinfer.models.layers.step import StepMetadata


@dataclass(frozen=True)
class Compressor:
    """Weights of a KV source layer's compressor and of its index keys."""

    layer_id: int
    ratio: int
    wkv: Tensor  # [d, D], or [2d, D] = [wkv | wgate] for ratio above 1, widened
    norm: Tensor  # [d]
    index_wk: Tensor  # [di, d]
    index_k_norm: Tensor  # [di]
    eps: float

    def forward(self, y: Tensor, step: StepMetadata, caches: Caches) -> None:
        """Write the latents and index keys of every group that this step completes. y [N, D]."""
        plan = step.compression[self.ratio]
        latent = ops.linear(y, self.wkv) if self.ratio == 1 else self._pool(y, step, caches)
        if latent.shape[0] == 0:
            return
        latent = ops.rms_norm(latent, self.norm, self.eps)
        # The index key comes from the latent before its rotation and rounding.
        cos, sin = plan.rotation.cos, plan.rotation.sin
        key = ops.norm_rope(ops.linear(latent, self.index_wk), self.index_k_norm, self.eps, cos, sin)
        latent = ops.rope(latent.unsqueeze(1), cos, sin, False).squeeze(1)
        ops.store_rows(caches.blocks.index_keys[self.layer_id], plan.group_slots, key, RowFormat.MXFP4)
        ops.store_rows(caches.blocks.latents[self.layer_id], plan.group_slots, latent, RowFormat.NVFP4)

    def _pool(self, y: Tensor, step: StepMetadata, caches: Caches) -> Tensor:
        """Softmax-weighted mean over the tokens of each group, in at least float32; open groups go to the carry."""
        plan = step.compression[self.ratio]
        carry = caches.state.carry[self.layer_id]  # [slots, C, 2, d]
        ab = wide_linear(y, self.wkv).unflatten(-1, (2, -1))  # [N, 2, d]
        pending = plan.pending_rows, plan.pending_slots, plan.pending_places
        return ops.pool_groups(ab, carry, step.state_slots, plan.members, *pending).to(y.dtype)
