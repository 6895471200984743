"""The definition of the DeepSeek-V4.1 text model: naive, cache-free, differentiable, plain PyTorch.

Read it top to bottom next to the spec, with `models/reference_parts.py` for the equations of single pieces. It
recomputes everything for the whole sequence, keeps all scores dense and marks what a query may see with boolean masks.
It is the oracle that the engine is tested against, and the model that `deepinfer.train` trains.

Shapes: B sequences of T tokens, D hidden size, hc residual streams, H query heads of d, G compressed positions.
Weights: a flat dict keyed by the public tensor names, scales folded in, routed experts stacked [E, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.config.parts import LayerPlan
from deepinfer.kernels.reference.quant import fp8_round_trip, mxfp4_round_trip, nvfp4_round_trip
from deepinfer.models.layers.rope import apply_rope, rope_frequencies, rope_table
from deepinfer.models.reference_parts import (
    ENGRAM_DEAD,
    Numerics,
    Weights,
    attend,
    candidate_mask,
    compress,
    engram,
    engram_hash_ids,
    index_scores,
    mhc_mix_in,
    mhc_mix_out,
    mhc_mixes,
    quantized_linear,
    rms_norm,
    round_trip,
    routed_experts,
    swiglu,
    top_k_mask,
)

# ------------------------------------------------------------------ what the layers share


@dataclass
class ReferenceOps:
    """The three inner operations that training replaces by faster, equivalent ones (deepinfer.train.fast_ops)."""

    attend: Callable[..., Tensor] = attend
    top_k_mask: Callable[[Tensor, int], Tensor] = top_k_mask
    experts: Callable[..., Tensor] = routed_experts


@dataclass
class SharedKV:
    """What owner layers publish for the layers that borrow from them, keyed by owner layer id."""

    latents: dict[int, Tensor] = field(default_factory=dict)  # [B, G, d]
    index_keys: dict[int, Tensor] = field(default_factory=dict)  # [B, G, di]
    selections: dict[int, Tensor] = field(default_factory=dict)  # bool [B, T, G]
    candidates: Tensor | None = None  # bool [B, T, G]


@dataclass
class Context:
    """Everything of one forward pass that the layers share."""

    config: ModelConfig
    numerics: Numerics
    ops: ReferenceOps
    ropes: dict[bool, Tensor]  # compressed? -> [T, 2, r / 2]
    shared: SharedKV = field(default_factory=SharedKV)
    image_span: Tensor | None = None  # bool [B, T]
    trace: dict[str, Tensor] | None = None
    keep_from: int = 0

    def note(self, name: str, value: Tensor) -> None:
        if self.trace is not None:
            self.trace[name] = value


# ------------------------------------------------------------------ attention (section 5)


def rotate(x: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """RoPE of x [B, T, d] or [B, T, H, d] with table [T, 2, r / 2]."""
    cos, sin = table.unbind(1)
    if x.dim() == 4:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return apply_rope(x, cos, sin, inverse)


def select(y: Tensor, qr: Tensor, w: Weights, name: str, plan: LayerPlan, context: Context) -> Tensor:
    """Selection of an index source layer: bool [B, T, G]."""
    config = context.config
    batch, length = y.shape[:2]
    iq = quantized_linear(qr, w[f"{name}.wq_b.weight"], context.numerics)
    iq = rotate(iq.unflatten(-1, (config.index_n_heads, config.index_head_dim)), context.ropes[True])
    if context.numerics.quantize_kv:
        iq = round_trip(iq, mxfp4_round_trip)
    weights = F.linear(y, w[f"{name}.weights_proj.weight"].to(y.dtype))
    weights = weights * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
    scores = index_scores(iq, weights, context.shared.index_keys[plan.kv_owner])
    visible_count = (torch.arange(length, device=y.device) + 1) // plan.compress_ratio
    visible = torch.arange(scores.shape[-1], device=y.device) < visible_count[:, None]  # [T, G]
    scores = scores.masked_fill(~visible, float("-inf"))
    if plan.writes_candidates:
        context.shared.candidates = candidate_mask(scores.detach(), visible_count - 1, config)
    restricted = scores
    if plan.reads_candidates and context.shared.candidates is not None:
        restricted = scores.masked_fill(~context.shared.candidates, float("-inf"))
    context.note(f"layers.{plan.layer_id}.index_scores", restricted)
    return context.ops.top_k_mask(restricted.detach(), config.index_topk)


def attention(y: Tensor, w: Weights, name: str, plan: LayerPlan, context: Context) -> Tensor:
    """Window and selected compressed keys in one softmax. y [B, T, D] -> [B, T, D]."""
    config, numerics, shared = context.config, context.numerics, context.shared
    batch, length = y.shape[:2]
    eps, ratio = config.rms_norm_eps, plan.compress_ratio
    table = context.ropes[ratio > 0]

    qr = rms_norm(quantized_linear(y, w[f"{name}.wq_a.weight"], numerics), w[f"{name}.q_norm.weight"], eps)
    q = quantized_linear(qr, w[f"{name}.wq_b.weight"], numerics)
    q = rotate(q.unflatten(-1, (config.num_attention_heads, config.head_dim)), table)

    window = rms_norm(quantized_linear(y, w[f"{name}.wkv.weight"], numerics), w[f"{name}.kv_norm.weight"], eps)
    window = rotate(window, table)
    if numerics.quantize_kv:
        window = round_trip(window, fp8_round_trip)
    distance = torch.arange(length, device=y.device)[:, None] - torch.arange(length, device=y.device)
    mask = (distance >= 0) & (distance < config.sliding_window)
    if plan.layer_id >= config.num_encoder_layers:  # bounded replay: the kept span does not look behind its start
        kept = torch.arange(length, device=y.device) >= context.keep_from
        mask = mask & (kept | ~kept[:, None])
    mask = mask.expand(batch, -1, -1)
    keys = window

    if plan.is_kv_source:
        latent = compress(y, w, f"{name}.compressor", ratio, config)
        first_token = table[: latent.shape[1] * ratio : ratio]  # a group is placed at its first token
        index_key = F.linear(latent, w[f"{name}.indexer.wk.weight"].to(latent.dtype))
        index_key = rotate(rms_norm(index_key, w[f"{name}.indexer.k_norm.weight"], eps), first_token)
        latent = rotate(latent, first_token)
        if numerics.quantize_kv:
            index_key, latent = round_trip(index_key, mxfp4_round_trip), round_trip(latent, nvfp4_round_trip)
        shared.index_keys[plan.layer_id], shared.latents[plan.layer_id] = index_key, latent
    if plan.is_index_source:
        shared.selections[plan.layer_id] = select(y, qr, w, f"{name}.indexer", plan, context)
    if ratio:
        keys = torch.cat((window, shared.latents[plan.kv_owner]), dim=1)
        mask = torch.cat((mask, shared.selections[plan.index_owner]), dim=-1)
    if plan.is_index_source:
        context.note(f"layers.{plan.layer_id}.queries", q)
        context.note(f"layers.{plan.layer_id}.latents", shared.latents[plan.kv_owner])
        context.note(f"layers.{plan.layer_id}.selection", shared.selections[plan.layer_id])

    o = context.ops.attend(q, keys, mask, w[f"{name}.attn_sink"], config.head_dim**-0.5)
    o = rotate(o, table, inverse=True).flatten(-2).unflatten(-1, (config.o_groups, -1))
    wo_a = w[f"{name}.wo_a.weight"].to(o.dtype).unflatten(0, (config.o_groups, config.o_lora_rank))
    a = torch.einsum("btgi,gri->btgr", o, wo_a).flatten(-2)
    return quantized_linear(a, w[f"{name}.wo_b.weight"], numerics)


# ------------------------------------------------------------------ mixture of experts (section 6)


def moe(y: Tensor, w: Weights, name: str, layer_id: int, context: Context) -> Tensor:
    """Routed experts plus the shared one. y [B, T, D] -> [B, T, D]."""
    config, numerics = context.config, context.numerics
    x = y.flatten(0, 1)
    compute = torch.promote_types(x.dtype, torch.float32)
    scores = F.softplus(F.linear(x.to(compute), w[f"{name}.gate.weight"].to(compute))).sqrt()
    bias = w[f"{name}.gate.bias"].to(compute).expand_as(scores)
    if context.image_span is not None:
        bias = torch.where(context.image_span.flatten()[:, None], w[f"{name}.gate.bias_vl"].to(compute), bias)
    ranked = (scores + bias).detach()
    chosen = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, : config.num_experts_per_tok]
    gates = scores.gather(-1, chosen)
    if config.norm_topk_prob:
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    gates = gates * config.routed_scaling_factor
    context.note(f"layers.{layer_id}.experts", chosen)
    w1, w2, w3 = (w[f"{name}.experts.{part}.weight"] for part in ("w1", "w2", "w3"))
    routed = context.ops.experts(x, chosen, gates, w1, w2, w3, config.swiglu_limit, numerics)
    g = quantized_linear(x, w[f"{name}.shared_experts.w1.weight"], numerics)
    u = quantized_linear(x, w[f"{name}.shared_experts.w3.weight"], numerics)
    z = swiglu(g, u, config.swiglu_limit).to(x.dtype)
    shared = quantized_linear(z, w[f"{name}.shared_experts.w2.weight"], numerics)
    return (routed + shared.to(routed.dtype)).to(y.dtype).view_as(y)


# ------------------------------------------------------------------ the whole model (section 0)


def block(h: Tensor, p_prev: Tensor, w: Weights, plan: LayerPlan, context: Context) -> tuple[Tensor, Tensor]:
    """One layer. The mix-in of each sub-layer uses the `pre` of the sub-layer before it (shifted mHC)."""
    config, name = context.config, f"layers.{plan.layer_id}"
    pre_attn, post, c = mhc_mixes(h, w, f"{name}.hc_attn", config)
    y = rms_norm(mhc_mix_in(p_prev, h), w[f"{name}.attn_norm.weight"], config.rms_norm_eps)
    h = mhc_mix_out(h, attention(y, w, f"{name}.attn", plan, context), post, c)
    pre_ffn, post, c = mhc_mixes(h, w, f"{name}.hc_ffn", config)
    y = rms_norm(mhc_mix_in(pre_attn, h), w[f"{name}.ffn_norm.weight"], config.rms_norm_eps)
    h = mhc_mix_out(h, moe(y, w, f"{name}.ffn", plan.layer_id, context), post, c)
    return h, pre_ffn


def forward(
    weights: Weights,
    config: ModelConfig,
    tokens: Tensor,
    token_map: Tensor | None = None,
    *,
    numerics: Numerics | None = None,
    ops: ReferenceOps | None = None,
    image_span: Tensor | None = None,
    input_embeddings: Tensor | None = None,
    trace: dict[str, Tensor] | None = None,
    return_hidden: bool = False,
    run_block: Callable[..., tuple[Tensor, Tensor]] = block,
    keep_from: int = 0,
) -> Tensor:
    """Logits of every position.

    Args:
        weights: in-memory weights; their dtype (of embed.weight) is the dtype of the computation.
        tokens: int64 [B, T].
        token_map: int64 [vocab], the Engram compressed token map; needed when the config has Engram layers.
        image_span: bool [B, T], True on every position of an image span.
        input_embeddings: [B, T, D] in place of the token embeddings (images).
        trace: filled with intermediate tensors (index scores, selections, chosen experts, DSpark taps).
        return_hidden: return the final normed hidden states [B, T, D] instead of logits.
        run_block: runs one layer (training wraps it in activation checkpointing).
        keep_from: first position that the decoder layers run (YoCo truncation); logits before it mean nothing.

    Returns:
        float [B, T, vocab] in at least float32.
    """
    length = tokens.shape[1]
    compute = torch.promote_types(weights["embed.weight"].dtype, torch.float32)
    ropes = {
        kind: rope_table(rope_frequencies(config, kind), length, compute).to(tokens.device) for kind in (False, True)
    }
    context = Context(
        config,
        numerics or Numerics(),
        ops or ReferenceOps(),
        ropes,
        image_span=image_span,
        trace=trace,
        keep_from=keep_from,
    )
    e = input_embeddings if input_embeddings is not None else F.embedding(tokens, weights["embed.weight"])
    h = e.unsqueeze(2).expand(-1, -1, config.hc_mult, -1)
    p_prev = torch.zeros(config.hc_mult, dtype=compute, device=tokens.device)
    p_prev[0] = 1.0
    p_prev = p_prev.expand(*tokens.shape, -1)
    alive = torch.ones_like(tokens, dtype=torch.bool) if image_span is None else ~image_span
    for plan in config.layers:
        if plan.has_engram:
            if token_map is None:
                raise ValueError("token_map: needed, the config has engram_layer_ids")
            compressed = torch.where(alive, token_map[tokens], ENGRAM_DEAD)
            ids = engram_hash_ids(compressed, int(token_map[config.engram_pad_token_id]), plan.layer_id, config)
            h = engram(h, ids, alive, weights, f"layers.{plan.layer_id}.engram", config, context.numerics)
        if plan.layer_id in config.dspark_target_layer_ids:
            context.note(f"layers.{plan.layer_id}.tap", h.mean(2))
        h, p_prev = run_block(h, p_prev, weights, plan, context)
    y = rms_norm(mhc_mix_in(p_prev, h), weights["norm.weight"], config.rms_norm_eps)
    if return_hidden:
        return y
    return F.linear(y.to(compute), weights["head.weight"].to(compute))
