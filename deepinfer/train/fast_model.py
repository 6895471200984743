"""The training forward pass: the equations of `models.reference`, arranged for speed, plus the indexer's own loss.

Read `models/reference.py` first; a test holds the two equal. What differs: element-wise pieces are compiled regions
shared by all layers, inner operations come from `fast_ops`, and selection is outside autograd, so the indexer learns
from a KL loss against the attention that it serves (as DeepSeek-V3.2 trains its indexer), on a sample of query rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.config.parts import LayerPlan
from deepinfer.models.layers.rope import apply_rope, rope_frequencies, rope_table
from deepinfer.models.reference import Numerics as ReferenceNumerics
from deepinfer.models.reference import Weights, engram_hash_ids, routed_experts
from deepinfer.train import fast_ops
from deepinfer.train.fast_quant import fp8_rows, mxfp4_rows, nvfp4_rows, straight_through


@dataclass
class StepInfo:
    """What a forward pass reports besides the hidden states."""

    index_losses: list[Tensor] = field(default_factory=list)
    expert_counts: dict[int, Tensor] = field(default_factory=dict)  # layer -> choices per expert [E]
    balance_losses: list[Tensor] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)  # [B, T, D] of each of tap_layers, for a draft head


@dataclass
class _Shared:
    latents: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)  # with gradient (to wk and k_norm)
    selections: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None


# ------------------------------------------------------------------ compiled regions


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of the last dimension, in float32."""
    x32 = x.float()
    return (weight.float() * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def mix_in(
    u: Tensor,
    h: Tensor,
    p_prev: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor,
    hc: int,
    eps: float,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Projected coefficients and streams -> pre, post, logits of C, and the sub-layer's normed input."""
    h32 = h.float()
    u = u * torch.rsqrt(h32.square().mean((-2, -1)) + eps).unsqueeze(-1)
    pre = torch.sigmoid(u[..., :hc] * scale[0] + base[:hc]) + hc_eps
    post = 2 * torch.sigmoid(u[..., hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    c = (u[..., 2 * hc :] * scale[2] + base[2 * hc :]).unflatten(-1, (hc, hc))
    return pre, post, c, norm((p_prev.unsqueeze(-1) * h32).sum(-2).to(h.dtype), weight, eps)


def mix_out(h: Tensor, y: Tensor, post: Tensor, c: Tensor) -> Tensor:
    """Post-mix of streams h [..., hc, D] with an output y [..., D]; post [..., hc], c [..., hc source, hc] (mHC)."""
    carried = (c.unsqueeze(-1) * h.float().unsqueeze(-2)).sum(-3)
    return (post.unsqueeze(-1) * y.float().unsqueeze(-2) + carried).to(h.dtype)


def engram_gate(h: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    hc, dim = h.shape[-2:]
    key, value = kv[..., : hc * dim].unflatten(-1, (hc, dim)).float(), kv[..., hc * dim :].float()
    h32 = h.float()
    scale = torch.rsqrt(h32.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (h32 * (q_weight.float() * k_weight.float()) * key).sum(-1) * scale / dim**0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    return (h32 + gate.unsqueeze(-1) * value.unsqueeze(-2)).to(h.dtype)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """x [B, T, H, d], table [T, 2, r / 2]."""
    return apply_rope(x, table[:, None, 0], table[:, None, 1])


def cache_row(
    x: Tensor, weight: Tensor, table: Tensor, eps: float, rounding: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Norm, RoPE and the cache's rounding: x [B, T, d], table [T, 2, r / 2]."""
    x32 = apply_rope(norm(x, weight, eps), table[:, 0], table[:, 1]).float()
    return (straight_through(x32, rounding(x32)) if rounding else x32).to(x.dtype)


def index_query(x: Tensor, table: Tensor, rounding: Callable[[Tensor], Tensor] | None) -> Tensor:
    """RoPE and FP4 rounding of index queries [B, R, Hi, di]."""
    x32 = rotate(x, table).float()
    return (straight_through(x32, rounding(x32)) if rounding else x32).to(x.dtype)


def pool_pairs(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Two tokens into one latent, channel by channel: a, b float32 [B, G, m, d] -> [B, G, d]."""
    return (a * torch.softmax(b, dim=2)).sum(2).to(dtype)


def finish_heads(o: Tensor, lse: Tensor, sink: Tensor, table: Tensor) -> Tensor:
    """Put the sink into the denominator and rotate back. o [B, T, H, d], lse [B, T, H]."""
    o = (o.float() * torch.sigmoid(lse.float() - sink).unsqueeze(-1)).to(o.dtype)
    return apply_rope(o, table[:, None, 0], table[:, None, 1], inverse=True)


def weighted_scores(dots: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
    """dots [B, T, Hi, G], weights [B, T, Hi], visible bool [T, G] -> float32 [B, T, G], -inf where invisible."""
    scores = (weights.float().unsqueeze(-1) * torch.relu(dots.float())).sum(-2)
    return scores.masked_fill(~visible, float("-inf"))


def swiglu(gu: Tensor, gate: Tensor, limit: float) -> Tensor:
    """gu [N, 2 I] (gate half, then up half), gate [N] -> gate * silu(g) * u, [N, I]."""
    g, u = gu.float().chunk(2, dim=-1)
    return (gate.unsqueeze(-1) * F.silu(g.clamp_max(limit)) * u.clamp(-limit, limit)).to(gu.dtype)


def gate_scores(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [..., E], square root of softplus (spec: model, section 6)."""
    return F.softplus(F.linear(x.float(), weight.float())).sqrt()


def mixture_of_experts(
    y: Tensor,
    w: Weights,
    name: str,
    config: ModelConfig,
    scores_of: Callable[..., Tensor],
    swiglu: Callable[..., Tensor],
    grouped: Callable[..., tuple[Tensor, Tensor]] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Routed and shared experts of the layer part `name`, whose sizes are `config`'s; y [B, T, D].

    `scores_of` and `swiglu` may be compiled; `grouped` runs the routed experts on a GPU. Returns the output, the tokens
    of each expert int64 [E] and the loss that keeps them balanced.
    """
    x = y.flatten(0, 1)
    scores = scores_of(x, w[f"{name}.gate.weight"])
    chosen = torch.topk(scores.detach() + w[f"{name}.gate.bias"], config.num_experts_per_tok, dim=-1).indices
    gates = scores.gather(-1, chosen)
    if config.norm_topk_prob:
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    gates = gates * config.routed_scaling_factor
    w1, w2, w3 = (w[f"{name}.experts.{part}.weight"] for part in ("w1", "w2", "w3"))
    if grouped is not None:
        routed, counts = grouped(x, chosen, gates, w1, w2, w3)
    else:
        routed = routed_experts(x, chosen, gates, w1, w2, w3, config.swiglu_limit, ReferenceNumerics())
        counts = torch.bincount(chosen.flatten(), minlength=config.n_routed_experts)
    share = counts.float() / chosen.numel()
    probability = (scores / (scores.sum(-1, keepdim=True) + 1e-20)).mean(0)
    w13 = torch.cat((w[f"{name}.shared_experts.w1.weight"], w[f"{name}.shared_experts.w3.weight"]))
    z = swiglu(F.linear(x, w13), torch.ones_like(x[:, 0], dtype=gates.dtype))
    out = (routed + F.linear(z, w[f"{name}.shared_experts.w2.weight"])).to(y.dtype).view_as(y)
    return out, counts, config.n_routed_experts * (share * probability).sum()


def token_losses(y: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy and squared log-partition of every token, float32 [N]; y [N, D], head [V, D], targets int64 [N]."""
    logits = F.linear(y.float(), head.float())
    partition = torch.logsumexp(logits, dim=-1)
    return partition - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1), partition.square()


# ------------------------------------------------------------------ the model


class FastModel:
    """Hidden states of full rows of `length` tokens, and losses.

    `quantize_kv` simulates the cache formats; `compiled` is for CUDA, where all calls should have one batch shape.
    `tap_layers` are those whose input a draft head reads. `flex` False: masked attention, which needs no compiling.
    """

    def __init__(
        self,
        config: ModelConfig,
        token_map: Tensor,
        length: int,
        device: str,
        *,
        quantize_kv: bool = True,
        compiled: bool = False,
        index_rows: int = 32,
        tap_layers: tuple[int, ...] = (),
        flex: bool = True,
    ) -> None:
        self.tap_layers = tap_layers
        self.config, self.length, self.index_rows = config, length, index_rows
        self.token_map = token_map.to(device, torch.int64)
        self.pad = int(token_map[config.engram_pad_token_id])
        self.ropes = {
            kind: rope_table(rope_frequencies(config, kind), length).to(device, torch.float32) for kind in (False, True)
        }
        position = torch.arange(length, device=device)
        self.newest = {m: (position + 1) // m - 1 for m in (1, 2)}
        self.visible = {m: torch.arange(length // m, device=device) <= self.newest[m][:, None] for m in (1, 2)}
        self.window = (position[:, None] >= position) & (position[:, None] - position < config.sliding_window)
        wrap: Callable[..., Any] = partial(torch.compile, dynamic=False) if compiled else lambda f: f
        eps, quantized = config.rms_norm_eps, quantize_kv
        self._mix_in = wrap(partial(mix_in, hc=config.hc_mult, eps=eps, hc_eps=config.hc_eps))
        self._mix_out = wrap(mix_out)
        self._engram_gate, self._rotate = wrap(partial(engram_gate, eps=eps)), wrap(rotate)
        self._window_row = wrap(partial(cache_row, eps=eps, rounding=fp8_rows if quantized else None))
        self._latent_row = wrap(partial(cache_row, eps=eps, rounding=nvfp4_rows if quantized else None))
        self._index_key = wrap(partial(cache_row, eps=eps, rounding=mxfp4_rows if quantized else None))
        self._index_query = wrap(partial(index_query, rounding=mxfp4_rows if quantized else None))
        self._pool, self._finish, self._scores = wrap(pool_pairs), wrap(finish_heads), wrap(weighted_scores)
        self._gate_scores = wrap(gate_scores)
        self._swiglu = wrap(partial(swiglu, limit=config.swiglu_limit))
        self._losses = wrap(token_losses)
        self._flex = fast_ops.FlexAttend(length, config.sliding_window, device) if flex and device != "cpu" else None
        self._grouped = fast_ops.GroupedExperts(self._swiglu, wrap) if device != "cpu" else None
        self._whole_selection: dict[tuple[int, int], Tensor] = {}

    def hidden(self, w: Weights, tokens: Tensor, *, dense: bool = False, train: bool = True) -> tuple[Tensor, StepInfo]:
        """Final normed hidden states [B, T, D] of tokens int64 [B, T].

        `dense` lets every query see all of its compressed positions (the indexer's warm-up); `train` adds its loss.
        """
        config, info, shared = self.config, StepInfo(), _Shared()
        rows = torch.randint(self.length, (self.index_rows,), device=tokens.device) if train else None
        h = fast_ops.lookup(w["embed.weight"], tokens).unsqueeze(2).expand(-1, -1, config.hc_mult, -1).contiguous()
        first = F.one_hot(torch.zeros_like(tokens), config.hc_mult).float().to(w["layers.0.hc_attn_fn"].dtype)
        p_prev = first.requires_grad_(train)
        compressed = self.token_map[tokens]
        for plan in config.layers:
            name = f"layers.{plan.layer_id}"
            if plan.has_engram:
                ids = engram_hash_ids(compressed, self.pad, plan.layer_id, config)
                rows_found = fast_ops.lookup(w[f"{name}.engram.embed.weight"], ids).flatten(-2)
                kv = F.linear(rows_found, w[f"{name}.engram.wkv.weight"])
                h = self._engram_gate(h, kv, w[f"{name}.engram.q_weight"], w[f"{name}.engram.k_weight"])
            if plan.layer_id in self.tap_layers:
                info.taps.append(h.float().mean(2).to(h.dtype))
            attend = partial(self._attention, w=w, plan=plan, shared=shared, info=info, dense=dense, rows=rows)
            h, p_prev = self._sub_layer(h, p_prev, w, f"{name}.hc_attn", f"{name}.attn_norm", attend)
            experts = partial(self._moe, w=w, layer_id=plan.layer_id, info=info)
            h, p_prev = self._sub_layer(h, p_prev, w, f"{name}.hc_ffn", f"{name}.ffn_norm", experts)
        mixed = (p_prev.unsqueeze(-1) * h.float()).sum(-2).to(h.dtype)
        return self._norm(mixed, w["norm.weight"]), info

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def losses(self, w: Weights, y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy and squared log-partition per token, [B, T] each."""
        ce, z = self._losses(y.flatten(0, 1), w["head.weight"], targets.flatten())
        return ce.view_as(targets), z.view_as(targets)

    def _sub_layer(
        self, h: Tensor, p_prev: Tensor, w: Weights, hc: str, norm_name: str, f: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        u = fast_ops.mix_projection(h, w[f"{hc}_fn"])
        pre, post, logits, y = self._mix_in(u, h, p_prev, w[f"{hc}_scale"], w[f"{hc}_base"], w[f"{norm_name}.weight"])
        c = fast_ops.sinkhorn(logits, self.config.hc_sinkhorn_iters, self.config.hc_eps)
        return self._mix_out(h, f(y), post, c), pre

    def _attention(
        self,
        y: Tensor,
        *,
        w: Weights,
        plan: LayerPlan,
        shared: _Shared,
        info: StepInfo,
        dense: bool,
        rows: Tensor | None,
    ) -> Tensor:
        config, name, ratio = self.config, f"layers.{plan.layer_id}.attn", plan.compress_ratio
        table = self.ropes[ratio > 0]
        scale = config.head_dim**-0.5
        qr = self._norm(F.linear(y, w[f"{name}.wq_a.weight"]), w[f"{name}.q_norm.weight"])
        q = F.linear(qr, w[f"{name}.wq_b.weight"]).unflatten(-1, (config.num_attention_heads, config.head_dim))
        q = self._rotate(q, table)
        keys = self._window_row(F.linear(y, w[f"{name}.wkv.weight"]), w[f"{name}.kv_norm.weight"], table)
        selection = None
        if plan.is_kv_source:
            self._compress(y, w, name, plan, shared)
        if ratio:
            latents = shared.latents[plan.kv_owner]
            if plan.is_index_source and not dense:
                shared.selections[plan.layer_id] = self._select(y, qr, w, f"{name}.indexer", plan, shared)
            if plan.is_index_source and rows is not None:
                info.index_losses.append(self._index_loss(y, qr, q, keys, w, name, plan, shared, rows))
            selection = self._everything(y.shape[0], ratio) if dense else shared.selections[plan.index_owner]
            keys = torch.cat((keys, latents), dim=1)
        sink = w[f"{name}.attn_sink"]
        if self._flex is not None:
            o, lse = self._flex(q, keys, selection, ratio, scale)
            o = self._finish(o, lse, sink, table)
        else:
            mask = self.window.expand(y.shape[0], -1, -1)
            mask = mask if selection is None else torch.cat((mask, selection), dim=-1)
            o = apply_rope(
                fast_ops.attend_sdpa(q, keys, mask, sink, scale), table[:, None, 0], table[:, None, 1], inverse=True
            )
        o = o.flatten(-2).unflatten(-1, (config.o_groups, -1))
        wo_a = w[f"{name}.wo_a.weight"].unflatten(0, (config.o_groups, config.o_lora_rank))
        return F.linear(torch.einsum("btgi,gri->btgr", o, wo_a).flatten(-2), w[f"{name}.wo_b.weight"])

    def _everything(self, batch: int, ratio: int) -> Tensor:
        if (batch, ratio) not in self._whole_selection:
            self._whole_selection[batch, ratio] = self.visible[ratio].expand(batch, -1, -1).contiguous()
        return self._whole_selection[batch, ratio]

    def _compress(self, y: Tensor, w: Weights, name: str, plan: LayerPlan, shared: _Shared) -> None:
        """Latents and index keys of a KV source; the index key comes from the detached latent before RoPE."""
        ratio, weight = plan.compress_ratio, w[f"{name}.compressor.wkv.weight"]
        norm_weight = w[f"{name}.compressor.norm.weight"]
        if ratio == 1:
            pooled = F.linear(y, weight)
        else:
            groups = (y.shape[1] // ratio, ratio)
            y32 = y.float()
            a = F.linear(y32, weight.float()).unflatten(1, groups)
            b = F.linear(y32, w[f"{name}.compressor.wgate.weight"].float()).unflatten(1, groups)
            pooled = self._pool(a, b, y.dtype)
        first_token = self.ropes[True][::ratio]
        shared.latents[plan.layer_id] = self._latent_row(pooled, norm_weight, first_token)
        latent = self._norm(pooled, norm_weight).detach()
        shared.index_keys[plan.layer_id] = self._index_key(
            F.linear(latent, w[f"{name}.indexer.wk.weight"]), w[f"{name}.indexer.k_norm.weight"], first_token
        )

    def _index_inputs(self, y: Tensor, qr: Tensor, w: Weights, name: str, table: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries [B, R, Hi, di] and head weights [B, R, Hi] of the rows in y and qr."""
        config = self.config
        iq = F.linear(qr, w[f"{name}.wq_b.weight"]).unflatten(-1, (config.index_n_heads, config.index_head_dim))
        weights = F.linear(y, w[f"{name}.weights_proj.weight"]) * (config.index_head_dim * config.index_n_heads) ** -0.5
        return self._index_query(iq, table), weights

    @torch.no_grad()
    def _select(self, y: Tensor, qr: Tensor, w: Weights, name: str, plan: LayerPlan, shared: _Shared) -> Tensor:
        """`reference.select`: bool [B, T, G]."""
        config, ratio = self.config, plan.compress_ratio
        iq, weights = self._index_inputs(y, qr, w, name, self.ropes[True])
        ik = shared.index_keys[plan.kv_owner]
        dots = (iq.flatten(1, 2) @ ik.transpose(1, 2)).unflatten(1, iq.shape[1:3])
        scores = self._scores(dots, weights, self.visible[ratio])
        if plan.writes_candidates:
            shared.candidates = self._candidates(scores, ratio)
        if plan.reads_candidates and shared.candidates is not None:
            scores = scores.masked_fill(~shared.candidates, float("-inf"))
        return fast_ops.top_k_mask(scores, config.index_topk)

    def _candidates(self, scores: Tensor, ratio: int) -> Tensor:
        """`reference.candidate_mask` with the fast top-k."""
        size, newest = self.config.candidate_block_size, self.newest[ratio]
        padding = -scores.shape[-1] % size
        blocks = F.pad(scores, (0, padding), value=float("-inf")).unflatten(-1, (-1, size)).amax(-1)
        own = F.one_hot((newest // size).clamp_min(0), blocks.shape[-1]).bool() & (newest >= 0)[:, None]
        kept = fast_ops.top_k_mask(blocks.masked_fill(own, float("inf")), self.config.candidate_topk_blocks)
        return kept.repeat_interleave(size, -1)[..., : scores.shape[-1]]

    def _index_loss(
        self,
        y: Tensor,
        qr: Tensor,
        q: Tensor,
        window: Tensor,
        w: Weights,
        name: str,
        plan: LayerPlan,
        shared: _Shared,
        rows: Tensor,
    ) -> Tensor:
        """KL(attention over the visible compressed positions, heads summed || softmax of index scores) of `rows`."""
        config, ratio = self.config, plan.compress_ratio
        latents = shared.latents[plan.kv_owner].detach()
        visible = self.visible[ratio][rows]  # [R, G]
        with torch.no_grad():
            keys = torch.cat((window, latents), dim=1)
            logits = torch.einsum("brhd,bsd->brhs", q[:, rows], keys).float() * config.head_dim**-0.5
            mask = torch.cat((self.window[rows], visible), dim=-1)
            logits = logits.masked_fill(~mask[:, None], float("-inf"))
            sink = w[f"{name}.attn_sink"].float().view(1, 1, -1, 1).expand(*logits.shape[:3], 1)
            p = torch.softmax(torch.cat((logits, sink), dim=-1), dim=-1)[..., self.length : -1].sum(2)
            p = p / p.sum(-1, keepdim=True).clamp_min(1e-9)
        iq, weights = self._index_inputs(
            y[:, rows].detach(), qr[:, rows].detach(), w, f"{name}.indexer", self.ropes[True][rows]
        )
        dots = torch.einsum("brhd,bgd->brhg", iq, shared.index_keys[plan.kv_owner]).float()
        scores = torch.einsum("brh,brhg->brg", weights.float(), torch.relu(dots))
        log_q = torch.log_softmax(scores.masked_fill(~visible, -1e9), dim=-1)
        return (torch.xlogy(p, p) - p * log_q).sum(-1).mean()

    def _moe(self, y: Tensor, *, w: Weights, layer_id: int, info: StepInfo) -> Tensor:
        out, counts, balance = mixture_of_experts(
            y, w, f"layers.{layer_id}.ffn", self.config, self._gate_scores, self._swiglu, self._grouped
        )
        info.expert_counts[layer_id] = counts
        info.balance_losses.append(balance)
        return out
