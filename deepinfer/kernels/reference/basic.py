"""Linear, norm, rotation and gated activation of flattened rows. N rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.reference.quant import dequantize_fp8_weight, fp8_round_trip
from deepinfer.kernels.registry import operation


@operation
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, K] @ weight [O, K] transposed -> [N, O] of x's dtype; a weight of a narrower one is widened first."""
    return F.linear(x, weight.to(x.dtype))


@operation
def linear_fp8(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """`linear` over a weight as checkpoints store it: E4M3 bytes [O, K] and E8M0 bytes [ceil(O / 32), K / 32]."""
    return F.linear(x, dequantize_fp8_weight(values.view(torch.float8_e4m3fn), scales, x.dtype))


@operation
def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` of each of G groups of columns: x [N, G, K], weight [G, O, K] -> [N, G * O]."""
    out = x.new_empty(x.shape[0], *weight.shape[:2])  # written in place: no copy to bring a row's groups together
    torch.bmm(x.transpose(0, 1), weight.to(x.dtype).transpose(1, 2), out=out.transpose(0, 1))
    return out.flatten(1)


@operation
def grouped_linear_fp8(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """`grouped_linear` over a weight as checkpoints store it: as of `linear_fp8`, the rows of all groups [G * O, K]."""
    weight = dequantize_fp8_weight(values.view(torch.float8_e4m3fn), scales, x.dtype)
    return grouped_linear.reference(x, weight.unflatten(0, (x.shape[1], -1)))


@operation
def round_fp8(x: Tensor) -> Tensor:
    """What an FP8 linear sees of its activations: E4M3, one power-of-two scale per 32 values of x [..., K]."""
    return fp8_round_trip(x)


@operation
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] * rsqrt(mean(x^2) + eps) * weight [D], computed in at least float32 (spec: model, section 3)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (weight.to(wide.dtype) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


@operation
def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Rotate adjacent pairs in the last `2 * cos.shape[-1]` dims of x [N, H, d]; cos, sin [N, pairs] are wide."""
    pairs = cos.shape[-1]
    split = x.shape[-1] - 2 * pairs
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = x[..., split:].to(cos.dtype).unflatten(-1, (pairs, 2)).unbind(-1)
    if inverse:
        sin = -sin
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :split], rotated.to(x.dtype)), dim=-1)


@operation
def norm_rope(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope` of `rms_norm`, rounded in between: x [N, d], weight [d], cos and sin [N, pairs] -> [N, d]."""
    return rope.reference(rms_norm.reference(x, weight, eps).unsqueeze(1), cos, sin, False).squeeze(1)


@operation
def norm_latents(
    x: Tensor, q_norm: Tensor, kv_norm: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """The query latent and the key of a token: `rms_norm` and `norm_rope` of the two parts of x [N, r + d].

    q_norm [r], kv_norm [d], cos and sin [N, pairs] -> [N, r], [N, d].
    """
    q, kv = x.split((len(q_norm), len(kv_norm)), dim=-1)
    return rms_norm.reference(q, q_norm, eps), norm_rope.reference(kv, kv_norm, eps, cos, sin)


@operation
def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(g, limit)) * clamp(u, -limit, limit) for gate_up [N, 2I] = [g | u] -> [N, I]."""
    g, u = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(g.clamp_max(limit)) * u.clamp(-limit, limit)).to(gate_up.dtype)
