"""mHC's mixes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.tilelang_ops.operations import DTYPES, call, covered, empty, launch


@call
def hc_post(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    n, hc, dim = h.shape
    if dim % 32 or not covered(h, y) or post.dtype is not torch.float32:
        return NotImplemented
    out = empty(h, n, hc, dim)
    sizes = (dim, hc, DTYPES[h.dtype])
    launch("hc_post_tl", sizes, *(t.contiguous() for t in (h, y, post, comb)), out)
    return out


@call
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
    outputs = _mix_outputs(h, p_prev, fn, norm_weight)
    if outputs is NotImplemented:
        return NotImplemented
    sizes = _mix_sizes(h, norm_weight, sinkhorn_iters, hc_eps, rms_eps)
    inputs = (h, p_prev, fn, scale.float(), base.float(), norm_weight)
    launch("hc_pre_tl", sizes, *(t.contiguous() for t in inputs), *outputs)
    return outputs


@call
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
    outputs = _mix_outputs(h, p_prev, fn, norm_weight)
    if outputs is NotImplemented:
        return NotImplemented
    streams = torch.empty_like(h, memory_format=torch.contiguous_format)
    sizes = _mix_sizes(h, norm_weight, sinkhorn_iters, hc_eps, rms_eps)
    inputs = (h, y, post, comb, p_prev, fn, scale.float(), base.float(), norm_weight)
    launch("hc_post_pre_tl", sizes, *(t.contiguous() for t in inputs), streams, *outputs)
    return streams, *outputs


def _mix_outputs(h: Tensor, p_prev: Tensor, fn: Tensor, norm_weight: Tensor) -> Any:
    n, hc, dim = h.shape
    wide = (t.dtype is torch.float32 for t in (p_prev, fn))
    if dim % 32 or hc * dim % 128 or not covered(h) or norm_weight.dtype not in DTYPES or not all(wide):
        return NotImplemented
    float32 = torch.float32
    return (
        empty(h, n, dim), empty(h, n, hc, dtype=float32), empty(h, n, hc, dtype=float32),
        empty(h, n, hc, hc, dtype=float32),
    )  # fmt: skip


def _mix_sizes(h: Tensor, norm_weight: Tensor, *numbers: float) -> tuple[Any, ...]:
    return (h.shape[2], h.shape[1], *numbers, DTYPES[norm_weight.dtype], DTYPES[h.dtype])
