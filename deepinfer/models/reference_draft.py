"""The definition of the DSpark draft head: naive, cache-free, plain PyTorch (spec: model, section 8).

Like `models/reference.py`, whose pieces it is made of, it recomputes everything from whole sequences. It is the oracle
of `models/draft_head.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.kernels.reference.quant import fp8_round_trip
from deepinfer.models.layers.rope import rope_frequencies, rope_table
from deepinfer.models.reference import (
    Context,
    Numerics,
    ReferenceOps,
    Weights,
    attend,
    mhc_mix_in,
    mhc_mix_out,
    mhc_mixes,
    moe,
    quantized_linear,
    rms_norm,
    rotate,
)


def window_rows(x: Tensor, w: Weights, name: str, table: Tensor, config: ModelConfig, numerics: Numerics) -> Tensor:
    """Keys, which are values too, of x [1, T, D] at the positions of table [T, 2, r / 2] -> [1, T, d]."""
    kv = rms_norm(
        quantized_linear(x, w[f"{name}.wkv.weight"], numerics), w[f"{name}.kv_norm.weight"], config.rms_norm_eps
    )
    kv = rotate(kv, table)
    return fp8_round_trip(kv) if numerics.quantize_kv else kv


def draft_attention(
    y: Tensor, context_rows: Tensor, w: Weights, name: str, table: Tensor, config: ModelConfig, numerics: Numerics
) -> Tensor:
    """y [1, B, D] sees context_rows [1, C, d] and all rows of its own block."""
    qr = quantized_linear(y, w[f"{name}.wq_a.weight"], numerics)
    qr = rms_norm(qr, w[f"{name}.q_norm.weight"], config.rms_norm_eps)
    q = quantized_linear(qr, w[f"{name}.wq_b.weight"], numerics)
    q = rotate(q.unflatten(-1, (config.num_attention_heads, config.head_dim)), table)
    keys = torch.cat((context_rows, window_rows(y, w, name, table, config, numerics)), dim=1)
    mask = torch.ones(1, y.shape[1], keys.shape[1], dtype=torch.bool, device=y.device)
    o = attend(q, keys, mask, w[f"{name}.attn_sink"], config.head_dim**-0.5)
    o = rotate(o, table, inverse=True).flatten(-2).unflatten(-1, (config.o_groups, -1))
    wo_a = w[f"{name}.wo_a.weight"].to(o.dtype).unflatten(0, (config.o_groups, config.o_lora_rank))
    a = torch.einsum("btgi,gri->btgr", o, wo_a).flatten(-2)
    return quantized_linear(a, w[f"{name}.wo_b.weight"], numerics)


def draft(
    weights: Weights,
    config: ModelConfig,
    taps: Tensor,
    token: Tensor,
    *,
    numerics: Numerics | None = None,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Greedy drafts behind one sequence.

    Args:
        taps: [p + 1, n * D], of positions 0..p, all that the target has processed.
        token: int64 [], sampled at p; it will be at p + 1.
        forced: int64 [B], drafts to take instead of the most likely ones.

    Returns:
        drafts int64 [B], raw confidence scores [B] and logits [B, V], the last two in at least float32.
    """
    numerics = numerics or Numerics()
    config = replace(
        config, n_routed_experts=config.dspark_n_routed_experts, num_experts_per_tok=config.dspark_num_experts_per_tok
    )
    w, size, length, eps = weights, config.dspark_block_size, taps.shape[0], config.rms_norm_eps
    compute = torch.promote_types(w["embed.weight"].dtype, torch.float32)
    table = rope_table(rope_frequencies(config, False), length + size, compute).to(taps.device)
    main_x = quantized_linear(taps[None], w["mtp.0.main_proj.weight"], numerics)
    main_x = rms_norm(main_x, w["mtp.0.main_norm.weight"], eps)
    block = torch.full((1, size), config.dspark_noise_token_id, dtype=torch.int64, device=taps.device)
    block[0, 0] = token
    h = F.embedding(block, w["embed.weight"]).unsqueeze(2).expand(-1, -1, config.hc_mult, -1)
    p_prev = torch.zeros(1, size, config.hc_mult, dtype=compute, device=taps.device)
    p_prev[..., 0] = 1.0
    context = Context(config, numerics, ReferenceOps(), {})
    behind, block_table = slice(max(0, length - config.sliding_window), length), table[length:]
    for stage in range(config.num_nextn_predict_layers):
        name = f"mtp.{stage}"
        seen = window_rows(main_x[:, behind], w, f"{name}.attn", table[behind], config, numerics)
        pre, post, c = mhc_mixes(h, w, f"{name}.hc_attn", config)
        y = rms_norm(mhc_mix_in(p_prev, h), w[f"{name}.attn_norm.weight"], eps)
        y = draft_attention(y, seen, w, f"{name}.attn", block_table, config, numerics)
        h = mhc_mix_out(h, y, post, c)
        after, post, c = mhc_mixes(h, w, f"{name}.hc_ffn", config)
        y = rms_norm(mhc_mix_in(pre, h), w[f"{name}.ffn_norm.weight"], eps)
        h = mhc_mix_out(h, moe(y, w, f"{name}.ffn", -1, context), post, c)
        p_prev = after
    last = f"mtp.{config.num_nextn_predict_layers - 1}"
    u = mhc_mix_in(p_prev, h)[0]
    base = F.linear(rms_norm(u, w[f"{last}.norm.weight"], eps).to(compute), w["head.weight"].to(compute))
    previous, drafts, scores, logits = token, [], [], []
    for i in range(size):
        e = w[f"{last}.markov_head.embed.weight"][previous]
        row = base[i] + w[f"{last}.markov_head.head.weight"].to(compute) @ e.to(compute)
        proj = w[f"{last}.confidence_head.proj.weight"][0].to(compute)
        scores.append(torch.cat((u[i], e)).to(compute) @ proj)
        logits.append(row)
        previous = row.argmax() if forced is None else forced[i]
        drafts.append(previous)
    return torch.stack(drafts), torch.stack(scores), torch.stack(logits)
