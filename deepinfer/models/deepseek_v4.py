"""DeepSeek-V4 as the engine runs it, against paged and state caches (spec: model, section 12).

What differs from V4.1: every compressing layer has its own compressor, with a position bias and (ratio 4) overlapping
groups; very long groups (ratio 128) are attended to without selection; query heads are normed; the first layers route
by token id; the mix-in of a sub-layer uses its own `pre`, and `hc_head_*` collapses the streams at the end.

Float weights and float caches only (fp32, bf16, fp64). The released FP8 / FP4 storage of V4, its FP8 window rows and
FP4 index keys, and its draft blocks are not implemented and are refused or skipped where they would be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config.model_v4 import LayerPlanV4, ModelConfigV4
from deepinfer.kernels import ops
from deepinfer.models.inputs import ModelInputs
from deepinfer.models.layers.hyper_connection import HyperConnection
from deepinfer.models.layers.rope import rope_frequencies
from deepinfer.models.layers.v4_attention import AttentionV4, IndexerV4
from deepinfer.models.layers.v4_caches import CachesV4, allocate_caches, block_bytes, slot_bytes
from deepinfer.models.layers.v4_compressor import CompressorV4
from deepinfer.models.layers.v4_moe import MoEV4
from deepinfer.models.layers.v4_step import StepMetadataV4


@dataclass(frozen=True)
class LayerV4:
    """One block."""

    attention_hc: HyperConnection
    attention: AttentionV4
    ffn_hc: HyperConnection
    ffn: MoEV4


class DeepseekV4:
    """The text model. `forward` reads and writes the caches that `allocate_caches` makes."""

    verifies_drafts = False  # its windows and carries have no room for tokens that are taken back

    def __init__(self, config: ModelConfigV4, weights: dict[str, Tensor]) -> None:
        """Take over `weights` of models/deepseek_v4_weights.py (emptied on return: the model holds the only copy).

        embed.weight's dtype is the dtype of the computation.
        """
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self.eos_token_ids = config.eos_token_ids
        self.embed = weights.pop("embed.weight")
        self.norm = weights.pop("norm.weight")
        self.dtype, self.device = self.embed.dtype, self.embed.device
        self.default_cache_dtype = self.dtype
        self.yoco_window: tuple[int, int] | None = None
        self.chosen_experts: list[Tensor] = []
        self.mark: Callable[[str], None] | None = None  # called with the name of the part that has just ended
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.head = weights.pop("head.weight").to(self.wide)
        self.head_fn, self.head_base, self.head_scale = (
            weights.pop(f"hc_head_{key}").to(self.wide) for key in ("fn", "base", "scale")
        )
        self.frequencies = {kind: rope_frequencies(config, kind).to(self.device) for kind in (False, True)}
        self.layers = [build_layer(weights, plan, config) for plan in config.layers]

    def block_bytes(self, block_size: int, cache_dtype: torch.dtype) -> int:
        """Bytes that one cache block takes in all layers."""
        return block_bytes(self.config, block_size, cache_dtype)

    def slot_bytes(self, cache_dtype: torch.dtype, max_backtracking_tokens: int = 0) -> int:
        """Bytes of the state of one sequence."""
        return slot_bytes(self.config, cache_dtype, self.wide)

    def allocate_caches(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        cache_dtype: torch.dtype,
        max_backtracking_tokens: int = 0,
    ) -> CachesV4:
        """Zeroed caches; `num_blocks` and `num_slots` include the null block and the null slot.

        Raises ValueError for more than one backtracking token: nothing is speculated here.
        """
        if max_backtracking_tokens > 1:
            raise ValueError(
                f"max_backtracking_tokens must be 1 or unset for this model, got {max_backtracking_tokens}"
            )
        return allocate_caches(self.config, num_blocks, block_size, num_slots, cache_dtype, self.wide, self.device)

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, caches: CachesV4) -> Tensor:
        """One step -> logits, at least float32 [R, vocab], of `inputs.logits_rows`."""
        config = self.config
        step = StepMetadataV4.build(inputs, config, self.frequencies, caches.blocks.block_size, self.wide)
        h = F.embedding(inputs.token_ids, self.embed).unsqueeze(1).expand(-1, config.hc_mult, -1).contiguous()
        for layer in self.layers:
            x, post, comb = hc_enter(h, layer.attention_hc, config)
            self._mark("rest")
            y = layer.attention.forward(x, config, step, caches)
            self._mark("attention")
            h = ops.hc_post(h, y, post, comb)
            x, post, comb = hc_enter(h, layer.ffn_hc, config)
            self._mark("rest")
            y = layer.ffn.forward(x, inputs.token_ids, config)
            self._mark("moe")
            h = ops.hc_post(h, y, post, comb)
        y = ops.rms_norm(self._collapse(h[inputs.logits_rows]), self.norm, config.rms_norm_eps)
        return ops.linear(y.to(self.wide), self.head)

    def _mark(self, part: str) -> None:
        if self.mark is not None:
            self.mark(part)

    def _collapse(self, h: Tensor) -> Tensor:
        """The streams [R, hc, D] weighted into one [R, D]."""
        z = h.flatten(1).to(self.wide)
        u = ops.linear(z, self.head_fn) * torch.rsqrt(z.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        pre = torch.sigmoid(u * self.head_scale + self.head_base) + self.config.hc_eps
        return mix_in(h, pre)


def mix_in(h: Tensor, pre: Tensor) -> Tensor:
    """sum_i pre[i] * h[i]: [N, hc, D], [N, hc] -> [N, D]."""
    return (pre.unsqueeze(-1) * h.to(pre.dtype)).sum(1).to(h.dtype)


def hc_enter(h: Tensor, weights: HyperConnection, config: ModelConfigV4) -> tuple[Tensor, Tensor, Tensor]:
    """Normed input x [N, D] of a sub-layer, its post [N, hc] and comb [N, hc, hc], from the streams h [N, hc, D]."""
    constants = (config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)
    # The operation mixes with the `pre` of the sub-layer before, as V4.1 does; V4 takes this sub-layer's own.
    before = torch.zeros(h.shape[:2], dtype=weights.fn.dtype, device=h.device)
    _, pre, post, comb = ops.hc_pre(h, before, weights.fn, weights.scale, weights.base, weights.norm, *constants)
    return ops.rms_norm(mix_in(h, pre), weights.norm, config.rms_norm_eps), post, comb


def build_layer(weights: dict[str, Tensor], plan: LayerPlanV4, config: ModelConfigV4) -> LayerV4:
    """Take the tensors of one layer out of `weights` and fuse those that share an input."""
    name = f"layers.{plan.layer_id}"
    wide = torch.promote_types(weights[f"{name}.attn.wq_b.weight"].dtype, torch.float32)

    def take(key: str) -> Tensor:
        return weights.pop(f"{name}.{key}")

    def hyper_connection(part: str) -> HyperConnection:
        fn, base, scale = (take(f"hc_{part}_{key}").to(wide) for key in ("fn", "base", "scale"))
        return HyperConnection(fn, base, scale, take(f"{part}_norm.weight"))

    def compressor(key: str) -> CompressorV4 | None:
        if f"{name}.{key}.wkv.weight" not in weights:
            return None
        wkv_wgate = torch.cat((take(f"{key}.wkv.weight"), take(f"{key}.wgate.weight"))).to(wide)
        return CompressorV4(wkv_wgate, take(f"{key}.ape").to(wide), take(f"{key}.norm.weight"), config.rms_norm_eps)

    indexer, index_compressor = None, compressor("attn.indexer.compressor")
    if index_compressor is not None:
        wq_b, weights_proj = take("attn.indexer.wq_b.weight"), take("attn.indexer.weights_proj.weight")
        indexer = IndexerV4(plan.layer_id, index_compressor, wq_b, weights_proj)
    wq_b = take("attn.wq_b.weight")
    attention = AttentionV4(
        plan,
        torch.cat((take("attn.wq_a.weight"), take("attn.wkv.weight"))),
        take("attn.q_norm.weight"),
        wq_b,
        torch.ones(config.head_dim, dtype=wq_b.dtype, device=wq_b.device),
        take("attn.kv_norm.weight"),
        take("attn.attn_sink"),
        take("attn.wo_a.weight").unflatten(0, (config.o_groups, config.o_lora_rank)),
        take("attn.wo_b.weight"),
        compressor("attn.compressor"),
        indexer,
    )
    ffn = MoEV4(
        take("ffn.gate.weight").to(wide),
        None if plan.hash_routing else take("ffn.gate.bias").to(wide),
        take("ffn.gate.tid2eid") if plan.hash_routing else None,
        take("ffn.experts.w13.weight"),
        take("ffn.experts.w2.weight"),
        take("ffn.shared_experts.w13.weight"),
        take("ffn.shared_experts.w2.weight"),
    )
    return LayerV4(hyper_connection("attn"), attention, hyper_connection("ffn"), ffn)
