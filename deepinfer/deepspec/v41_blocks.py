"""The V4.1 draft head as training sees it: many blocks of many rows at once, differentiable, in the stored numerics.

The equations are those of `models/reference_draft.py` (a test holds the two equal), arranged like
`train/fast_model.py`: R rows of T tokens, A anchors a row, B rows a block. An anchor p stands for "the target has
processed positions 0..p, and token p + 1 was just sampled".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.deepspec.losses import Blocks
from deepinfer.models.checkpoint_format import parameter_specs
from deepinfer.models.layers.rope import apply_rope, rope_frequencies, rope_table
from deepinfer.models.reference import Weights
from deepinfer.train import fast_model, fast_ops
from deepinfer.train.fast_quant import fp8_rows, straight_through
from deepinfer.train.parameters import Kind, residual_base

# First match wins: rule of the optimiser, and starting deviation times sqrt(columns) (None: a constant).
RULES: tuple[tuple[str, str, float | None], ...] = (
    ("gate.bias", "balance", None),
    ("confidence_head", "vector", 0.1),
    ("markov_head.embed", "head", 1.0),
    ("markov_head.head", "head", 0.1),
    ("ffn.gate.weight", "router", 0.5),
    ("_fn", "router", 0.5),
    ("norm.weight", "vector", None),
    ("attn_sink", "vector", None),
    ("_base", "vector", None),
    ("_scale", "vector", None),
    ("wo_b", "matrix", 0.1),
    ("w2.weight", "matrix", 0.1),
    ("", "matrix", 0.5),
)


def draft_kinds(config: ModelConfig) -> list[Kind]:
    """The head's tensors as stacks over its stages; `gate.bias_vl` is left out (drafts are text)."""
    stacks: dict[str, list[str]] = {}
    specs = parameter_specs(config)
    for name in specs:
        if name.startswith("mtp.") and not name.endswith("bias_vl"):
            stacks.setdefault("mtp.*." + name.split(".", 2)[2], []).append(name)
    kinds = []
    for kind, names in stacks.items():
        rule, gain = next((rule, gain) for part, rule, gain in RULES if part in kind)
        spec = specs[names[0]]
        kinds.append(Kind(kind, tuple(names), spec.shape, spec.storage, rule, gain))
    return kinds


def initial_masters(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """FP32 stacks by kind name, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    masters = {}
    for kind in draft_kinds(config):
        shape = (len(kind.names), *kind.shape)
        if kind.gain is not None:
            masters[kind.name] = torch.randn(shape, generator=generator) * kind.gain * kind.shape[-1] ** -0.5
        elif kind.name.endswith(("attn_sink", "bias")):
            masters[kind.name] = torch.zeros(shape)
        elif kind.name.endswith("_base"):
            part = int("ffn" in kind.name)
            rows = [residual_base(2 * stage + part, config.hc_mult) for stage in range(len(kind.names))]
            masters[kind.name] = torch.stack(rows)
        else:
            masters[kind.name] = torch.full(shape, 0.1 if kind.name.endswith("_scale") else 1.0)
    return masters


@dataclass(frozen=True)
class V41Blocks(Blocks):
    """N = R * A blocks of the head, and how its experts were used."""

    scores: Tensor
    expert_counts: Tensor  # [stages, E], choices of each expert
    balance_loss: Tensor  # []


class BlockModel:
    """Draft blocks at anchors of rows. `embed` and `head` [V, D] are the target's and stay as they are."""

    def __init__(
        self, config: ModelConfig, embed: Tensor, head: Tensor, length: int, *, quantize_kv: bool = True
    ) -> None:
        self.config = replace(
            config,
            n_routed_experts=config.dspark_n_routed_experts,
            num_experts_per_tok=config.dspark_num_experts_per_tok,
        )
        self.embed, self.head = embed, head.float()
        self.size, self.stages = config.dspark_block_size, config.num_nextn_predict_layers
        device = embed.device
        table = rope_table(rope_frequencies(config, False), length + self.size + 1).to(device, torch.float32)
        self.cos, self.sin = table.unbind(1)
        self.rounding: Callable[[Tensor], Tensor] | None = fp8_rows if quantize_kv else None
        self.swiglu = partial(fast_model.swiglu, limit=config.swiglu_limit)
        self.grouped = fast_ops.GroupedExperts(self.swiglu, lambda f: f) if embed.is_cuda else None

    def __call__(self, w: Weights, taps: Tensor, tokens: Tensor, anchors: Tensor) -> V41Blocks:
        """taps [R, T, n * D], tokens int64 [R, T + 1], anchors int64 [R, A], each at most T - 1 - B."""
        config, size, eps = self.config, self.size, self.config.rms_norm_eps
        rows, num_anchors = anchors.shape
        offsets = torch.arange(size, device=anchors.device)
        positions = (anchors.unsqueeze(-1) + 1 + offsets).flatten(1)  # [R, A * B]
        known = tokens.gather(1, positions).unflatten(1, (num_anchors, size))  # x0, then the tokens to be drafted
        block = known.masked_fill(offsets > 0, config.dspark_noise_token_id).flatten(1)
        seen = anchors.unsqueeze(-1) + torch.arange(1 - config.sliding_window, 1, device=anchors.device)  # [R, A, W]
        first = torch.arange(rows, device=anchors.device).view(-1, 1, 1) * taps.shape[1]
        index, visible = first + seen.clamp_min(0), seen >= 0
        main_x = fast_model.norm(F.linear(taps, w["mtp.0.main_proj.weight"]), w["mtp.0.main_norm.weight"], eps)
        h = F.embedding(block, self.embed).unsqueeze(2).expand(-1, -1, config.hc_mult, -1).contiguous()
        p_prev = F.one_hot(torch.zeros_like(block), config.hc_mult).float()
        counts, balance = [], []

        def attend(y: Tensor, name: str) -> Tensor:
            return self._attention(y, main_x, w, name, positions, index, visible)

        def experts(y: Tensor, name: str) -> Tensor:
            out, count, loss = self._moe(y, w, name)
            counts.append(count)
            balance.append(loss)
            return out

        for stage in range(self.stages):
            name = f"mtp.{stage}"
            h, p_prev = self._sub_layer(h, p_prev, w, name, "attn", attend)
            h, p_prev = self._sub_layer(h, p_prev, w, name, "ffn", experts)
        u = (p_prev.unsqueeze(-1) * h.float()).sum(-2).to(h.dtype)
        last = f"mtp.{self.stages - 1}"
        base = F.linear(fast_model.norm(u, w[f"{last}.norm.weight"], eps).float(), self.head)
        e = fast_ops.lookup(w[f"{last}.markov_head.embed.weight"], known.flatten(1))
        logits = base + F.linear(e.float(), w[f"{last}.markov_head.head.weight"].float())
        features = torch.cat((u, e), dim=-1).detach().float()  # confidence learns from the draft, not the other way
        scores = features @ w[f"{last}.confidence_head.proj.weight"][0].float()
        shape = (rows * num_anchors, size)
        return V41Blocks(
            logits.reshape(*shape, -1), scores.reshape(shape), torch.stack(counts), torch.stack(balance).mean()
        )

    def _sub_layer(
        self, h: Tensor, p_prev: Tensor, w: Weights, name: str, part: str, f: Callable[[Tensor, str], Tensor]
    ) -> tuple[Tensor, Tensor]:
        c = self.config
        u = fast_ops.mix_projection(h, w[f"{name}.hc_{part}_fn"])
        coefficients = w[f"{name}.hc_{part}_scale"], w[f"{name}.hc_{part}_base"], w[f"{name}.{part}_norm.weight"]
        pre, post, logits, y = fast_model.mix_in(u, h, p_prev, *coefficients, c.hc_mult, c.rms_norm_eps, c.hc_eps)
        mixed = fast_ops.sinkhorn(logits, c.hc_sinkhorn_iters, c.hc_eps)
        return fast_model.mix_out(h, f(y, name), post, mixed), pre

    def _window_rows(self, kv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows = apply_rope(fast_model.norm(kv, weight, self.config.rms_norm_eps), cos, sin).float()
        return (straight_through(rows, self.rounding(rows)) if self.rounding else rows).to(kv.dtype)

    def _attention(
        self, y: Tensor, main_x: Tensor, w: Weights, name: str, positions: Tensor, index: Tensor, visible: Tensor
    ) -> Tensor:
        """y [R, A * B, D]: every row sees its anchor's window over main_x [R, T, D] and its whole block."""
        c, size, name = self.config, self.size, f"{name}.attn"
        wkv, kv_norm, length = w[f"{name}.wkv.weight"], w[f"{name}.kv_norm.weight"], main_x.shape[1]
        cos, sin = self.cos[positions], self.sin[positions]
        qr = fast_model.norm(F.linear(y, w[f"{name}.wq_a.weight"]), w[f"{name}.q_norm.weight"], c.rms_norm_eps)
        q = F.linear(qr, w[f"{name}.wq_b.weight"]).unflatten(-1, (c.num_attention_heads, c.head_dim))
        q = apply_rope(q, cos.unsqueeze(2), sin.unsqueeze(2)).reshape(-1, size * c.num_attention_heads, c.head_dim)
        context = self._window_rows(F.linear(main_x, wkv), kv_norm, self.cos[:length], self.sin[:length])
        context = fast_ops.lookup(context.flatten(0, 1), index.flatten(0, 1))  # [N, W, d]
        own = self._window_rows(F.linear(y, wkv), kv_norm, cos, sin).reshape(-1, size, c.head_dim)
        keys = torch.cat((context, own), dim=1)
        mask = F.pad(visible.flatten(0, 1), (0, size), value=True).unsqueeze(1)  # [N, 1, W + B]
        logits = (q @ keys.transpose(1, 2)).float() * c.head_dim**-0.5
        logits = logits.masked_fill(~mask, float("-inf"))
        sink = w[f"{name}.attn_sink"].float().repeat(size).view(1, -1, 1).expand(len(logits), -1, 1)
        p = torch.softmax(torch.cat((logits, sink), dim=-1), dim=-1)[..., :-1]
        o = (p.to(keys.dtype) @ keys).view(*y.shape[:2], c.num_attention_heads, c.head_dim)
        o = apply_rope(o, cos.unsqueeze(2), sin.unsqueeze(2), inverse=True)
        o = o.flatten(-2).unflatten(-1, (c.o_groups, -1))
        wo_a = w[f"{name}.wo_a.weight"].unflatten(0, (c.o_groups, c.o_lora_rank))
        return F.linear(torch.einsum("btgi,gri->btgr", o, wo_a).flatten(-2), w[f"{name}.wo_b.weight"])

    def _moe(self, y: Tensor, w: Weights, name: str) -> tuple[Tensor, Tensor, Tensor]:
        return fast_model.mixture_of_experts(
            y, w, f"{name}.ffn", self.config, fast_model.gate_scores, self.swiglu, self.grouped
        )
