"""mHC residual streams: the post-mix of one sub-layer fused with the pre-mix of the next (spec: model, section 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.registry import operation


@operation
def hc_post(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """h'[j] = post[j] * y + sum_i comb[i, j] * h[i].

    h [N, hc, D], y [N, D], post [N, hc], comb [N, hc source, hc destination] -> [N, hc, D].
    """
    carried = torch.einsum("nij,nid->njd", comb, h.to(comb.dtype))
    return (post.unsqueeze(-1) * y.to(comb.dtype).unsqueeze(-2) + carried).to(h.dtype)


@operation
def hc_pre(
    h: Tensor,
    p_prev: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    rms_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sub-layer input and the coefficients of this sub-layer.

    h [N, hc, D], p_prev [N, hc] (the `pre` of the sub-layer before), fn [hc * (2 + hc), hc * D], scale [3],
    base [hc * (2 + hc)], norm_weight [D] -> x [N, D] normed, pre [N, hc], post [N, hc], comb [N, hc, hc].
    """
    hc = h.shape[1]
    z = h.flatten(1).to(torch.promote_types(h.dtype, torch.float32))
    u = F.linear(z, fn.to(z.dtype)) * torch.rsqrt(z.square().mean(-1, keepdim=True) + rms_eps)
    scale, base = scale.to(z.dtype), base.to(z.dtype)
    pre = torch.sigmoid(u[:, :hc] * scale[0] + base[:hc]) + hc_eps
    post = 2 * torch.sigmoid(u[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    comb = (u[:, 2 * hc :] * scale[2] + base[2 * hc :]).unflatten(-1, (hc, hc)).softmax(-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    mixed = (p_prev.unsqueeze(-1) * h.to(p_prev.dtype)).sum(1).to(h.dtype)
    wide = mixed.to(z.dtype)
    x = norm_weight.to(z.dtype) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + rms_eps))
    return x.to(h.dtype), pre, post, comb


@operation
def hc_post_pre(
    h: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    p_prev: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    rms_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`hc_post` of the previous sub-layer, then `hc_pre` of this one, in one call -> h', x, pre, post, comb."""
    h = hc_post.reference(h, y, post, comb)
    return h, *hc_pre.reference(h, p_prev, fn, scale, base, norm_weight, sinkhorn_iters, hc_eps, rms_eps)
