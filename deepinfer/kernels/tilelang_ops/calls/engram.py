"""Engram's hash and gate."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.tilelang_ops.operations import DTYPES, call, covered, empty, launch


@call
def engram_hash(history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int) -> Tensor:
    n, length = history.shape
    heads = primes.shape[1]
    out = empty(history, n, (length - 1) * heads)
    launch("engram_hash_tl", (length, heads, pad), history.contiguous(), multipliers, primes, offsets, out)
    return out


@call
def engram_gate(h: Tensor, kv: Tensor, weight: Tensor, alive: Tensor | None, eps: float) -> Tensor:
    n, hc, dim = h.shape
    if dim % 32 or not covered(h, kv):
        return NotImplemented
    out = empty(h, n, hc, dim)
    shown = torch.ones(1, dtype=torch.uint8, device=h.device) if alive is None else alive.to(torch.uint8)
    sizes = (hc, dim, eps, alive is not None, DTYPES[h.dtype])
    launch("engram_gate_tl", sizes, h.contiguous(), kv.contiguous(), weight.float(), shown, out)
    return out
