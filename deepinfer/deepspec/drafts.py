"""Drafts for any target: DFlash, DSpark and Eagle3 from Qwen3-style layers (spec: field, section 3.5).

All answer the same question in training and evaluation: given the target's taps of whole rows, the tokens, and anchors
("positions 0..p are processed, token p + 1 was just sampled"), what are the draft logits of the next B tokens, each
given the true tokens before it? Embedding and output head are the target's and frozen.

- DFlash: one pass over [token, noise, noise, ...]; every layer reads the fused taps of the context as keys and values.
- DSpark: DFlash, a low-rank Markov term on the token before, and a confidence for each draft.
- Eagle3: one layer, one token a step; its own output stands in for the taps from the second step on.

Shapes: R rows of T tokens, A anchors a row, B drafts a block, N = R * A.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.deepspec.losses import Blocks
from deepinfer.deepspec.targets import Shape, Target

ALGORITHMS = ("dflash", "dspark", "eagle3")


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of a draft; `target` is the shape of what it drafts for."""

    algorithm: str
    target: Shape
    block_size: int = 5
    num_layers: int = 2
    num_heads: int = 8
    head_dim: int = 64
    intermediate_size: int = 1024
    markov_rank: int = 64
    noise_token_id: int = 0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm: {self.algorithm!r}, allowed: {', '.join(ALGORITHMS)}")
        for name in ("block_size", "num_layers", "num_heads", "head_dim", "intermediate_size", "markov_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}, allowed: at least 1")
        if self.algorithm == "eagle3" and self.num_layers != 1:
            raise ValueError(f"num_layers: {self.num_layers}, allowed: 1, an eagle3 draft has one layer")
        if not 0 <= self.noise_token_id < self.target.vocab_size:
            raise ValueError(f"noise_token_id: {self.noise_token_id}, allowed: 0..{self.target.vocab_size - 1}")

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DraftConfig:
        """From what `to_dict` gave."""
        return cls(**{**raw, "target": Shape(**raw["target"])})


class RMSNorm(nn.Module):
    """Root mean square norm, in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE of x [R, L, H, d] at positions int64 [R, L], halves paired as in Qwen3."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = (positions.unsqueeze(-1).float() * frequencies).unsqueeze(2)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1).to(x.dtype)


class Layer(nn.Module):
    """Attention and SwiGLU; keys and values may come from other rows than the queries. `width` is that of the input."""

    def __init__(self, config: DraftConfig, width: int) -> None:
        super().__init__()
        dim, inner, eps = config.target.hidden_size, config.num_heads * config.head_dim, config.rms_norm_eps
        self.config = config
        self.q, self.k, self.v = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, dim, bias=False)
        self.q_norm, self.k_norm = RMSNorm(config.head_dim, eps), RMSNorm(config.head_dim, eps)
        self.post_norm = RMSNorm(dim, eps)
        self.gate, self.up = (nn.Linear(dim, config.intermediate_size, bias=False) for _ in range(2))
        self.down = nn.Linear(config.intermediate_size, dim, bias=False)

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, L, width] -> keys and values [R, L, H, d]."""
        shape = (self.config.num_heads, self.config.head_dim)
        k = rotate(self.k_norm(self.k(x).unflatten(-1, shape)), positions, self.config.rope_theta)
        return k, self.v(x).unflatten(-1, shape)

    def forward(
        self, residual: Tensor, x: Tensor, positions: Tensor, kv: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """residual [R, L, D] and its normed form x [R, L, width] -> [R, L, D]; mask bool [R, L, keys]."""
        shape = (self.config.num_heads, self.config.head_dim)
        q = rotate(self.q_norm(self.q(x).unflatten(-1, shape)), positions, self.config.rope_theta)
        q, k, v = (t.transpose(1, 2) for t in (q, *kv))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1)).transpose(1, 2).flatten(-2)
        h = residual + self.o(o)
        y = self.post_norm(h)
        return h + self.down(F.silu(self.gate(y)) * self.up(y))


def block_positions(anchors: Tensor, size: int) -> Tensor:
    """int64 [R, A * B]: p + 1, ..., p + B of every anchor p [R, A]."""
    return (anchors.unsqueeze(-1) + 1 + torch.arange(size, device=anchors.device)).flatten(1)


class BlockDraft(nn.Module):
    """DFlash and DSpark."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        dim, eps = config.target.hidden_size, config.rms_norm_eps
        self.config = config
        self.fuse = nn.Linear(config.target.num_taps * dim, dim, bias=False)
        self.fuse_norm, self.norm = RMSNorm(dim, eps), RMSNorm(dim, eps)
        self.layers = nn.ModuleList(Layer(config, dim) for _ in range(config.num_layers))
        self.input_norms = nn.ModuleList(RMSNorm(dim, eps) for _ in range(config.num_layers))
        if config.algorithm == "dspark":
            vocab, rank = config.target.vocab_size, config.markov_rank
            self.markov_embed, self.markov_head = nn.Embedding(vocab, rank), nn.Linear(rank, vocab, bias=False)
            self.confidence = nn.Linear(dim + rank, 1, bias=False)
            nn.init.normal_(self.markov_head.weight, std=1e-3)

    def forward(self, target: Target, taps: Tensor, tokens: Tensor, anchors: Tensor) -> Blocks:
        """taps [R, T, n * D], tokens int64 [R, T + 1], anchors int64 [R, A], each at most T - 1 - B."""
        size, length = self.config.block_size, taps.shape[1]
        rows, num_anchors = anchors.shape
        positions = block_positions(anchors, size)
        known = tokens.gather(1, positions)
        place = torch.arange(positions.shape[1], device=anchors.device)
        block = known.masked_fill(place % size > 0, self.config.noise_token_id)
        context = self.fuse_norm(self.fuse(taps.to(self.fuse.weight.dtype)))
        h = F.embedding(block, target.embed).to(context.dtype)
        at = torch.arange(length, device=anchors.device).expand(rows, -1)
        behind = at.unsqueeze(1) <= anchors.repeat_interleave(size, 1).unsqueeze(-1)  # [R, A * B, T]
        same = (place.unsqueeze(1) // size == place // size).expand(rows, -1, -1)
        mask = torch.cat((behind, same), dim=-1)
        for layer, norm in zip(cast(Iterable[Layer], self.layers), self.input_norms, strict=True):
            x = norm(h)
            parts = zip(layer.keys(context, at), layer.keys(x, positions), strict=True)
            k, v = (torch.cat(pair, dim=1) for pair in parts)
            h = layer(h, x, positions, (k, v), mask)
        logits = F.linear(self.norm(h).float(), target.head)
        scores = None
        if self.config.algorithm == "dspark":
            e = self.markov_embed(known)
            logits = logits + self.markov_head(e).float()
            scores = self.confidence(torch.cat((h, e), dim=-1).detach()).float().view(-1, size)
        return Blocks(logits.view(rows * num_anchors, size, -1), scores)


class Eagle3Draft(nn.Module):
    """Eagle3: a row's input is the embedding of the next token beside the fused taps, or the step before's output."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        dim, eps = config.target.hidden_size, config.rms_norm_eps
        self.config = config
        self.fuse = nn.Linear(config.target.num_taps * dim, dim, bias=False)
        self.embed_norm, self.hidden_norm, self.norm = (RMSNorm(dim, eps) for _ in range(3))
        self.layer = Layer(config, 2 * dim)

    def forward(self, target: Target, taps: Tensor, tokens: Tensor, anchors: Tensor) -> Blocks:
        """As BlockDraft.forward; the steps of a block see the rows up to their anchor and the steps before them."""
        size, length = self.config.block_size, taps.shape[1]
        rows, num_anchors = anchors.shape
        fused = self.fuse(taps.to(self.fuse.weight.dtype))
        e = self.embed_norm(F.embedding(tokens, target.embed).to(fused.dtype))  # [R, T + 1, D]
        at = torch.arange(length, device=anchors.device).expand(rows, -1)
        k, v = self.layer.keys(torch.cat((e[:, 1:], self.hidden_norm(fused)), dim=-1), at)
        mask = at.unsqueeze(1) <= anchors.unsqueeze(-1)  # [R, A, T]
        own = torch.eye(num_anchors, dtype=torch.bool, device=anchors.device).expand(rows, -1, -1)
        pick = torch.arange(rows, device=anchors.device).unsqueeze(1)
        hidden, outputs = fused[pick, anchors], []
        for step in range(size):
            positions = anchors + step
            x = torch.cat((e[pick, positions + 1], self.hidden_norm(hidden)), dim=-1)
            if step:  # the first step is the anchor's own row, whose keys are among the context's
                k, v = (torch.cat(pair, dim=1) for pair in zip((k, v), self.layer.keys(x, positions), strict=True))
                mask = torch.cat((mask, own), dim=-1)
            hidden = self.layer(hidden, x, positions, (k, v), mask)
            outputs.append(F.linear(self.norm(hidden).float(), target.head))
        return Blocks(torch.stack(outputs, dim=2).view(rows * num_anchors, size, -1), None)


def build_draft(config: DraftConfig, seed: int = 0) -> BlockDraft | Eagle3Draft:
    """A new draft with seeded weights."""
    torch.manual_seed(seed)
    return Eagle3Draft(config) if config.algorithm == "eagle3" else BlockDraft(config)
