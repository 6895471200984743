"""One block of the model: Engram, attention and MoE with the mixing in front of each, from public tensor names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.config.parts import LayerPlan
from deepinfer.models.layers.attention import Attention
from deepinfer.models.layers.compressor import Compressor
from deepinfer.models.layers.engram import Engram, EngramHash
from deepinfer.models.layers.hyper_connection import HyperConnection
from deepinfer.models.layers.indexer import Indexer
from deepinfer.models.layers.linear import widened
from deepinfer.models.layers.moe import Experts, MoE, StoredExperts
from deepinfer.models.loader import StoredTensor


@dataclass(frozen=True)
class Layer:
    """One block of the backbone or of the draft head."""

    plan: LayerPlan
    engram: Engram | None
    attention_hc: HyperConnection
    attention: Attention
    ffn_hc: HyperConnection
    ffn: MoE


def build_layer(
    weights: dict[str, Tensor],
    plan: LayerPlan,
    config: ModelConfig,
    token_map: Tensor | None,
    stored_experts: dict[str, StoredTensor] | None = None,
    name: str | None = None,
) -> Layer:
    """Take the tensors `name`.* of one layer out of `weights` and fuse those that share an input."""
    name = name or f"layers.{plan.layer_id}"
    wide = torch.promote_types(weights[f"{name}.attn.wq_b.weight"].dtype, torch.float32)

    def take(key: str) -> Tensor:
        return weights.pop(f"{name}.{key}")

    def hyper_connection(part: str) -> HyperConnection:
        fn, base, scale = (take(f"hc_{part}_{key}").to(wide) for key in ("fn", "base", "scale"))
        return HyperConnection(fn, base, scale, take(f"{part}_norm.weight"))

    engram = None
    if plan.has_engram and token_map is not None:
        pad = int(token_map[config.engram_pad_token_id])
        engram = Engram(
            EngramHash.build(config, plan.layer_id, pad, token_map.device),
            take("engram.embed.weight"),
            take("engram.wkv.weight"),
            take("engram.q_weight").to(wide) * take("engram.k_weight").to(wide),
        )
    compressor = None
    if plan.is_kv_source:
        wkv = take("attn.compressor.wkv.weight")
        if plan.compress_ratio > 1:
            wkv = widened(torch.cat((wkv, take("attn.compressor.wgate.weight"))))
        compressor = Compressor(
            plan.layer_id,
            plan.compress_ratio,
            wkv,
            take("attn.compressor.norm.weight"),
            take("attn.indexer.wk.weight"),
            take("attn.indexer.k_norm.weight"),
            config.rms_norm_eps,
        )
    indexer = None
    if plan.is_index_source:
        indexer = Indexer(plan, take("attn.indexer.wq_b.weight"), take("attn.indexer.weights_proj.weight"))
    attention = Attention(
        plan,
        torch.cat((take("attn.wq_a.weight"), take("attn.wkv.weight"))),
        take("attn.q_norm.weight"),
        take("attn.wq_b.weight"),
        take("attn.kv_norm.weight"),
        take("attn.attn_sink"),
        take("attn.wo_a.weight").unflatten(0, (config.o_groups, config.o_lora_rank)),
        take("attn.wo_b.weight"),
        compressor,
        indexer,
    )
    experts: Experts | StoredExperts
    if stored_experts is None:
        w13 = torch.cat((take("ffn.experts.w1.weight"), take("ffn.experts.w3.weight")), dim=1)
        experts = Experts(w13, take("ffn.experts.w2.weight"))
    else:
        w1, w3, w2 = (stored_experts.pop(f"{name}.ffn.experts.{part}.weight") for part in ("w1", "w3", "w2"))
        assert w1.scale is not None and w3.scale is not None and w2.scale is not None  # FP4 always has one
        w13_scale = torch.cat((w1.scale, w3.scale), dim=1)
        experts = StoredExperts(torch.cat((w1.values, w3.values), dim=1), w13_scale, w2.values, w2.scale)
    ffn = MoE(
        widened(take("ffn.gate.weight")),
        take("ffn.gate.bias").to(wide),
        take("ffn.gate.bias_vl").to(wide),
        experts,
        torch.cat((take("ffn.shared_experts.w1.weight"), take("ffn.shared_experts.w3.weight"))),
        take("ffn.shared_experts.w2.weight"),
    )
    return Layer(plan, engram, hyper_connection("attn"), attention, hyper_connection("ffn"), ffn)
