"""The gate of the experts, and the rows around them."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.tilelang_ops.operations import DTYPES, call, covered, empty, launch


@call
def moe_gate(logits: Tensor, bias: Tensor, k: int, normalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
    n, experts = logits.shape
    if logits.dtype is not torch.float32:
        return NotImplemented
    chosen, gates = empty(logits, n, k, dtype=torch.int32), empty(logits, n, k)
    sizes = (experts, k, normalise, scaling, bias.dim() == 2)
    launch("moe_gate_tl", sizes, logits.contiguous(), bias.float().view(-1, experts).contiguous(), chosen, gates)
    return chosen, gates


@call
def expert_order(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    counts = torch.zeros(num_experts, dtype=torch.int32, device=chosen.device)
    order, places = empty(chosen, chosen.numel()), torch.empty_like(chosen)
    launch("expert_order_tl", (num_experts,), chosen.flatten(), counts, order, places.view(-1))
    return counts, order, places


@call
def expand_rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    if not covered(x):
        return NotImplemented
    out = empty(x, len(order), x.shape[1])
    launch("expand_rows_tl", (x.shape[1], k, DTYPES[x.dtype]), x.contiguous(), order, out)
    return out


@call
def reduce_rows(z: Tensor, places: Tensor, gates: Tensor) -> Tensor:
    if not covered(z) or gates.dtype is not torch.float32:
        return NotImplemented
    out = empty(z, len(places), z.shape[1])
    sizes = (z.shape[1], places.shape[1], DTYPES[z.dtype])
    launch("reduce_rows_tl", sizes, z.contiguous(), places, gates.contiguous(), out)
    return out
