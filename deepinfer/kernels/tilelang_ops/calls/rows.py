"""Norm, gated activation and rotation of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.tilelang_ops.operations import DTYPES, call, covered, empty, launch


@call
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dim = x.shape[-1]
    if dim % 32 or not covered(x, weight):
        return NotImplemented
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch("rms_norm_tl", (dim, eps, DTYPES[x.dtype]), x.reshape(-1, dim).contiguous(), weight, out.view(-1, dim))
    return out


@call
def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    n, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if not covered(gate_up):
        return NotImplemented
    out = empty(gate_up, n, inner)
    launch("swiglu_tl", (inner, limit, DTYPES[gate_up.dtype]), gate_up.contiguous(), out)
    return out


@call
def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    if not covered(x) or cos.dtype is not torch.float32:
        return NotImplemented
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = (x.shape[1], x.shape[2], cos.shape[1], inverse, DTYPES[x.dtype])
    launch("rope_tl", sizes, x.contiguous(), cos.contiguous(), sin.contiguous(), out)
    return out


@call
def norm_rope(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    n, dim = x.shape
    if dim % 32 or not covered(x, weight) or cos.dtype is not torch.float32:
        return NotImplemented
    out = empty(x, n, dim)
    sizes = (dim, cos.shape[1], eps, DTYPES[x.dtype])
    launch("norm_rope_tl", sizes, x.contiguous(), weight, cos.contiguous(), sin.contiguous(), out)
    return out
