"""The pieces that the reference model is made of: plain functions of tensors, an equation block of the spec each.

`models/reference.py` puts them together, and has the shapes and the meaning of the weights. Nothing here knows a layer:
what a function needs of the configuration it reads from it, and what layers share is no business of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.kernels.reference.quant import fp8_round_trip
from deepinfer.models.layers.engram_map import engram_multipliers

Weights = dict[str, Tensor]
ENGRAM_DEAD = -1  # compressed id of a position that no n-gram may cross (image spans)


@dataclass(frozen=True)
class Numerics:
    """Which roundings are simulated. Both off is the float oracle."""

    quantize_kv: bool = False  # FP8 window, FP4 compressed KV, FP4 index keys and queries
    quantize_activations: bool = False  # FP8 activations of the FP8 and FP4 linears


class _StraightThrough(torch.autograd.Function):
    """Rounding in the forward pass, identity in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def round_trip(x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """`rounding(x)` with a straight-through gradient."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _StraightThrough.apply(x, rounding)
    return rounding(x)


# ------------------------------------------------------------------ small pieces


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight, computed in at least float32."""
    x32 = x.to(torch.promote_types(x.dtype, torch.float32))
    return (weight.to(x32.dtype) * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def quantized_linear(x: Tensor, weight: Tensor, numerics: Numerics) -> Tensor:
    """x @ weight.T where the checkpoint stores the weight in FP8 or FP4: the activation may be rounded to FP8 too."""
    if numerics.quantize_activations:
        x = round_trip(x, fp8_round_trip)
    return F.linear(x, weight.to(x.dtype))


# ------------------------------------------------------------------ mHC residual streams (section 4)


def mhc_mixes(h: Tensor, w: Weights, name: str, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of one sub-layer from the streams before it.

    h [B, T, hc, D] -> pre [B, T, hc], post [B, T, hc], C [B, T, hc source, hc destination].
    """
    hc, eps = config.hc_mult, config.hc_eps
    compute = torch.promote_types(h.dtype, torch.float32)
    z = h.flatten(-2).to(compute)
    u = F.linear(z, w[f"{name}_fn"].to(compute))
    u = u * torch.rsqrt(z.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    scale, base = w[f"{name}_scale"].to(compute), w[f"{name}_base"].to(compute)
    pre = torch.sigmoid(u[..., :hc] * scale[0] + base[:hc]) + eps
    post = 2 * torch.sigmoid(u[..., hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    c = (u[..., 2 * hc :] * scale[2] + base[2 * hc :]).unflatten(-1, (hc, hc))
    c = torch.softmax(c, dim=-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return pre, post, c


def mhc_mix_in(pre: Tensor, h: Tensor) -> Tensor:
    """sum_i pre[i] * h[i]: [B, T, hc], [B, T, hc, D] -> [B, T, D]."""
    return (pre.unsqueeze(-1) * h.to(pre.dtype)).sum(-2).to(h.dtype)


def mhc_mix_out(h: Tensor, y: Tensor, post: Tensor, c: Tensor) -> Tensor:
    """h'[j] = post[j] * y + sum_i C[i, j] * h[i]."""
    carried = torch.einsum("btij,btid->btjd", c, h.to(c.dtype))
    return (post.unsqueeze(-1) * y.to(c.dtype).unsqueeze(-2) + carried).to(h.dtype)


# ------------------------------------------------------------------ Engram n-gram memory (section 4)


def engram_hash_ids(compressed: Tensor, pad: int, layer_id: int, config: ModelConfig) -> Tensor:
    """Table rows of every position. compressed int64 [B, T] (ENGRAM_DEAD where blocked) -> int64 [B, T, heads].

    `pad` is the compressed id that stands for everything beyond a boundary.
    """
    index = config.engram_layer_ids.index(layer_id)
    primes = config.engram_primes[index]
    multipliers = engram_multipliers(layer_id, config.engram_compressed_vocab_size)
    length = compressed.shape[1]
    blocked = torch.zeros_like(compressed, dtype=torch.bool)
    mixed, ids, offset = torch.zeros_like(compressed), [], 0
    for step in range(config.engram_max_ngram_size):
        shifted = F.pad(compressed, (step, 0), value=ENGRAM_DEAD)[:, :length]
        blocked = blocked | (shifted == ENGRAM_DEAD)  # sticky: nothing is read across a boundary
        token = torch.where(blocked, pad, shifted)
        mixed = mixed ^ (token * int(multipliers[step]))
        if step == 0:
            continue
        for head in range(config.engram_n_heads):
            prime = primes[(step - 1) * config.engram_n_heads + head]
            ids.append(mixed % prime + offset)
            offset += prime
    return torch.stack(ids, dim=-1)


def engram(
    h: Tensor, hash_ids: Tensor, alive: Tensor, w: Weights, name: str, config: ModelConfig, numerics: Numerics
) -> Tensor:
    """Gate the looked-up memory into the streams. h [B, T, hc, D], hash_ids [B, T, heads], alive bool [B, T]."""
    hc, dim, eps = config.hc_mult, config.hidden_size, config.rms_norm_eps
    rows = F.embedding(hash_ids, w[f"{name}.embed.weight"]).flatten(-2).to(h.dtype)
    kv = quantized_linear(rows, w[f"{name}.wkv.weight"], numerics)
    compute = torch.promote_types(h.dtype, torch.float32)
    key = kv[..., : hc * dim].unflatten(-1, (hc, dim)).to(compute)
    value = kv[..., hc * dim :].to(compute)
    h32 = h.to(compute)
    weight = w[f"{name}.q_weight"].to(compute) * w[f"{name}.k_weight"].to(compute)
    norm = torch.rsqrt(h32.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (h32 * weight * key).sum(-1) * norm / dim**0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot)) * alive.unsqueeze(-1)
    return (h32 + gate.unsqueeze(-1) * value.unsqueeze(-2)).to(h.dtype)


# ------------------------------------------------------------------ attention (section 5)


def attend(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Softmax with a sink in the denominator; keys are the values too.

    q [B, T, H, d], keys [B, S, d], mask bool [B, T, S], sink [H] -> [B, T, H, d].
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    logits = torch.einsum("bthd,bsd->bhts", q, keys).to(compute) * scale
    logits = logits.masked_fill(~mask[:, None], float("-inf"))
    column = sink.to(compute).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    probabilities = torch.softmax(torch.cat((logits, column), dim=-1), dim=-1)[..., :-1]
    return torch.einsum("bhts,bsd->bthd", probabilities.to(keys.dtype), keys)


def top_k_mask(scores: Tensor, k: int) -> Tensor:
    """True at the k largest finite scores of each row; ties go to the lowest index. [..., G] -> bool [..., G]."""
    k = min(k, scores.shape[-1])
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
    return chosen & (scores > float("-inf"))


def compress(y: Tensor, w: Weights, name: str, ratio: int, config: ModelConfig) -> Tensor:
    """Latents of complete groups, before RoPE. y [B, T, D] -> [B, T // ratio, d]."""
    groups = y.shape[1] // ratio
    y = y[:, : groups * ratio]
    if ratio == 1:
        pooled = F.linear(y, w[f"{name}.wkv.weight"].to(y.dtype))
    else:
        compute = torch.promote_types(y.dtype, torch.float32)
        a = F.linear(y.to(compute), w[f"{name}.wkv.weight"].to(compute)).unflatten(1, (groups, ratio))
        b = F.linear(y.to(compute), w[f"{name}.wgate.weight"].to(compute)).unflatten(1, (groups, ratio))
        pooled = (a * torch.softmax(b, dim=2)).sum(2).to(y.dtype)
    return rms_norm(pooled, w[f"{name}.norm.weight"], config.rms_norm_eps)


def index_scores(iq: Tensor, weights: Tensor, ik: Tensor) -> Tensor:
    """sum_h weights[t, h] * relu(iq[t, h] . ik[g]).

    iq [B, T, Hi, di], weights [B, T, Hi], ik [B, G, di] -> [B, T, G].
    """
    compute = torch.promote_types(iq.dtype, torch.float32)
    dots = torch.einsum("bthd,bgd->bthg", iq, ik).to(compute)
    return torch.einsum("bth,bthg->btg", weights.to(compute), torch.relu(dots))


def candidate_mask(scores: Tensor, newest: Tensor, config: ModelConfig) -> Tensor:
    """Positions inside the kept candidate blocks. scores [B, T, G] (-inf where invisible), newest int64 [T] -> bool."""
    size = config.candidate_block_size
    padding = -scores.shape[-1] % size
    blocks = F.pad(scores, (0, padding), value=float("-inf")).unflatten(-1, (-1, size)).amax(-1)
    own = (newest // size).view(1, -1, 1).expand(blocks.shape[0], -1, 1)
    pin = torch.where(newest >= 0, float("inf"), float("-inf")).to(blocks.dtype).view(1, -1, 1).expand_as(own)
    blocks = blocks.scatter(-1, own.clamp_min(0), pin)
    kept = top_k_mask(blocks, config.candidate_topk_blocks)
    return kept.repeat_interleave(size, -1)[..., : scores.shape[-1]]


# ------------------------------------------------------------------ mixture of experts (section 6)


def swiglu(g: Tensor, u: Tensor, limit: float) -> Tensor:
    """silu(min(g, limit)) * clamp(u, -limit, limit), in at least float32."""
    compute = torch.promote_types(g.dtype, torch.float32)
    return F.silu(g.to(compute).clamp_max(limit)) * u.to(compute).clamp(-limit, limit)


def routed_experts(
    x: Tensor, chosen: Tensor, gates: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float, numerics: Numerics
) -> Tensor:
    """One expert after the other. x [N, D], chosen int64 [N, k], gates [N, k], w1 and w3 [E, I, D], w2 [E, D, I]."""
    out = torch.zeros(x.shape, dtype=gates.dtype, device=x.device)
    for expert in range(w1.shape[0]):
        row, slot = torch.where(chosen == expert)
        if row.numel() == 0:
            continue
        xe = x[row]
        z = swiglu(quantized_linear(xe, w1[expert], numerics), quantized_linear(xe, w3[expert], numerics), limit)
        z = (gates[row, slot].unsqueeze(-1) * z).to(x.dtype)
        out = out.index_add(0, row, quantized_linear(z, w2[expert], numerics).to(out.dtype))
    return out
