"""Engram: n-gram hashes of compressed token ids and the gate into the streams (spec: model, section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.registry import operation

BOUNDARY = -1  # compressed id that no n-gram crosses


@operation
def ngram_ids(
    token_ids: Tensor,
    token_map: Tensor,
    history: Tensor,
    state_slots: Tensor,
    sources: Tensor,
    kept_rows: Tensor | None,
    kept_slots: Tensor,
    kept_places: Tensor,
) -> Tensor:
    """Compressed ids that each row's n-gram is made of; then the history takes in the last tokens of each sequence.

    token_ids int64 [N], token_map int64 [vocab]; history int64 [slots, H], kept ids, written in place; state_slots
    int64 [S]; sources int64 [N, n] into [N new rows | S * H kept ids | BOUNDARY]; kept_rows int64 [K] (None: all) and
    where they go, history[slot, place] -> int64 [N, n].
    """
    boundary = torch.full((1,), BOUNDARY, device=history.device)
    ids = token_map[token_ids]
    ngrams = torch.cat((ids, history[state_slots].flatten(), boundary))[sources]
    history[kept_slots, kept_places] = ids if kept_rows is None else ids[kept_rows]
    return ngrams


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
