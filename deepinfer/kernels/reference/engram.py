"""Engram: n-gram hashes of compressed token ids and the gate into the streams (spec: model, section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.registry import operation


@operation
def engram_hash(history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int) -> Tensor:
    """Table rows of each token.

    history int64 [N, n]: compressed ids of the token itself, the one before, ... (-1 = boundary: it and everything
    older count as `pad`); multipliers int64 [n]; primes and offsets int64 [(n - 1), heads] -> int64 [N, (n-1) * heads].
    """
    blocked = (history < 0).cumsum(1) > 0
    mixed = torch.where(blocked, pad, history) * multipliers
    ids = []
    running = mixed[:, 0]
    for step in range(1, history.shape[1]):
        running = running ^ mixed[:, step]
        ids.append(running.unsqueeze(1) % primes[step - 1] + offsets[step - 1])
    return torch.cat(ids, dim=1)


@operation
def engram_gate(h: Tensor, kv: Tensor, weight: Tensor, alive: Tensor | None, eps: float) -> Tensor:
    """Add the gated memory to every stream.

    h [N, hc, D], kv [N, (hc + 1) * D] = keys then the value, weight [hc, D] = q_weight * k_weight, alive bool [N] or
    None (all) -> [N, hc, D].
    """
    hc, dim = h.shape[1:]
    compute = torch.promote_types(h.dtype, torch.float32)
    key, value = kv[:, : hc * dim].unflatten(-1, (hc, dim)).to(compute), kv[:, hc * dim :].to(compute)
    wide = h.to(compute)
    norm = torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (wide * weight.to(compute) * key).sum(-1) * norm / dim**0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    if alive is not None:
        gate = gate * alive.unsqueeze(-1)
    return (wide + gate.unsqueeze(-1) * value.unsqueeze(1)).to(h.dtype)
