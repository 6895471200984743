"""Norm, rotation and gated activation of flattened rows. One program a row (or a few heads of it)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.common import covered, rows_of
from deepinfer.kernels.reference import basic  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend


@triton.jit
def _rms_norm(x, weight, out, x_stride, dim, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < dim
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / dim + eps)
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) * (value * scale)
    tl.store(out + row * dim + at, value.to(out.dtype.element_ty), mask=inside)


@backend("rms_norm", "cuda")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not covered(x, weight):
        return NotImplemented
    x, stride = rows_of(x)
    dim = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(dim)
    warps = min(max(block // 512, 1), 8)
    _rms_norm[(x.numel() // dim,)](x, weight.contiguous(), out, stride, dim, eps, BLOCK=block, num_warps=warps)
    return out


@triton.jit
def _rope(
    x, cos, sin, out, x_row, x_head, heads, dim, pairs, sign, HEADS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (column < dim)
    turned = column - (dim - 2 * pairs)
    is_turned = (turned >= 0) & inside
    source = x + row * x_row + head * x_head
    value = tl.load(source + column, mask=inside, other=0.0)
    partner = tl.load(source + (dim - 2 * pairs) + (turned ^ 1), mask=is_turned, other=0.0).to(tl.float32)
    pair = row * pairs + (turned >> 1)
    inside_pairs = (turned >= 0) & (column < dim)
    c = tl.load(cos + pair, mask=inside_pairs, other=1.0)
    s = tl.load(sin + pair, mask=inside_pairs, other=0.0) * sign
    s = tl.where((turned & 1) == 0, -s, s)  # even: e c - o s; odd: o c + e s
    rotated = (value.to(tl.float32) * c + partner * s).to(out.dtype.element_ty)
    tl.store(out + (row * heads + head) * dim + column, tl.where(is_turned, rotated, value), mask=inside)


@backend("rope", "cuda")
def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    if not covered(x) or cos.dtype is not torch.float32:
        return NotImplemented
    if x.stride(-1) != 1:
        x = x.contiguous()
    n, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(dim)
    at_once = min(triton.next_power_of_2(heads), max(4096 // block, 1))
    grid = (n, triton.cdiv(heads, at_once))
    _rope[grid](
        x, cos.contiguous(), sin.contiguous(), out, x.stride(0), x.stride(1), heads, dim, cos.shape[-1],
        -1.0 if inverse else 1.0, HEADS=at_once, BLOCK=block,
    )  # fmt: skip
    return out


@triton.jit
def gated(g, u, limit):
    """silu(min(g, limit)) * clamp(u, -limit, limit); NaN stays NaN."""
    g = tl.where(g > limit, limit, g)
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    return g / (1.0 + tl.exp(-g)) * u


@triton.jit
def _swiglu(gate_up, out, stride, rows, inner, limit, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (at < inner)
    g = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * stride + inner + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * inner + at, gated(g, u, limit).to(out.dtype.element_ty), mask=inside)


def swiglu_tile(n: int, inner: int) -> tuple[int, int]:
    """Rows and columns of a program: 2,048 values where there are many, columns that leave none idle if they can."""
    block = min(triton.next_power_of_2(inner), 2048)
    whole = inner & -inner
    if 128 <= whole < block:
        block = min(whole, block)
    return (2048 // block if n * inner >= 1 << 20 else 1), block


@backend("swiglu", "cuda")
def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    if not covered(gate_up):
        return NotImplemented
    gate_up, stride = rows_of(gate_up)
    n, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(n, inner, dtype=gate_up.dtype, device=gate_up.device)
    rows, block = swiglu_tile(n, inner)
    _swiglu[(triton.cdiv(n, rows), triton.cdiv(inner, block))](
        gate_up, out, stride, n, inner, limit, ROWS=rows, BLOCK=block
    )
    return out
