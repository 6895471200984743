"""Mixture of experts: gate and routed experts (spec: model, section 6)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.reference.basic import swiglu
from deepinfer.kernels.reference.quant import dequantize_fp4_weight, fp8_round_trip
from deepinfer.kernels.registry import operation


@operation
def moe_gate(logits: Tensor, bias: Tensor, k: int, normalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
    """sqrt-softplus scores; the bias steers the choice only (noaux_tc); ties go to the lowest expert.

    logits [N, E] in at least float32, bias [E] or [N, E] -> chosen int32 [N, k], gates [N, k].
    """
    scores = F.softplus(logits).sqrt()
    chosen = torch.sort(scores + bias.to(scores.dtype), dim=-1, descending=True, stable=True).indices[:, :k]
    gates = scores.gather(-1, chosen)
    if normalise:
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    return chosen.to(torch.int32), gates * scaling


@operation
def moe_experts(
    x: Tensor, chosen: Tensor, gates: Tensor, w13: Tensor, w2: Tensor, limit: float, quantize_activations: bool
) -> Tensor:
    """sum over the chosen experts of gate * SwiGLU expert, accumulated in at least float32.

    x [N, D], chosen int32 [N, k], gates [N, k], w13 [E, 2I, D] = [w1 | w3], w2 [E, D, I] -> [N, D] of gates' dtype.
    """
    out = torch.zeros(x.shape, dtype=gates.dtype, device=x.device)
    source = fp8_round_trip(x) if quantize_activations else x
    for expert in chosen.unique().tolist():
        row, slot = torch.where(chosen == expert)
        z = swiglu.reference(F.linear(source[row], w13[expert]).to(gates.dtype), limit)
        z = (gates[row, slot].unsqueeze(-1) * z).to(x.dtype)
        z = fp8_round_trip(z) if quantize_activations else z
        out.index_add_(0, row, F.linear(z, w2[expert]).to(out.dtype))
    return out


@operation
def moe_experts_fp4(
    x: Tensor,
    chosen: Tensor,
    gates: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    limit: float,
    quantize_activations: bool,
) -> Tensor:
    """`moe_experts` over the stored form of the weights, an eighth of the bytes of float32.

    w13 uint8 [E, 2I, D/2] and w2 uint8 [E, D, I/2]: E2M1 pairs, low nibble first; w13_scale [E, 2I, D/32] and
    w2_scale [E, D, I/32]: E8M0 bytes. The rest as in `moe_experts`.
    """
    used, position = chosen.unique(return_inverse=True)
    w13, w2 = (
        dequantize_fp4_weight(values[used], scale[used], x.dtype)
        for values, scale in ((w13, w13_scale), (w2, w2_scale))
    )
    return moe_experts.reference(x, position, gates, w13, w2, limit, quantize_activations)


@operation
def expert_order(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The token-expert pairs sorted by expert, those of one expert in the order of their tokens.

    chosen int32 [N, k] -> counts int32 [num_experts]: pairs of each expert; order int32 [N * k]: the pair (row * k +
    slot) at each place; places int32 [N, k]: the place of each pair, the inverse.
    """
    pairs = chosen.flatten()
    order = pairs.sort(stable=True).indices
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.bincount(pairs, minlength=num_experts)
    return counts.to(torch.int32), order.to(torch.int32), places.view(chosen.shape).to(torch.int32)


@operation
def expand_rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    """Rows of x [N, D] for the pairs `order` int32 [P] of `expert_order`, k of each row -> [P, D]."""
    return x[order.long() // k]


@operation
def reduce_rows(z: Tensor, places: Tensor, gates: Tensor) -> Tensor:
    """Each token's weighted sum of its experts' rows, added in the order of its slots in at least float32.

    z [P, D], places int32 [N, k], gates [N, k] -> [N, D] of z's dtype.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    out = torch.zeros(len(places), z.shape[1], dtype=wide, device=z.device)
    for slot in range(places.shape[1]):
        out += gates[:, slot, None].to(wide) * z[places[:, slot].long()].to(wide)
    return out.to(z.dtype)
