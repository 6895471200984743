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
def _normed(x, weight, at, inside, scale):
    """weight * x * scale at columns `at`, rounded as the norm's result is."""
    value = tl.load(x + at, mask=inside, other=0.0)
    weight = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    return (weight * (value.to(tl.float32) * scale)).to(value.dtype)


@triton.jit
def _norm_latents(
    x, q_norm, kv_norm, cos, sin, q_out, kv_out, x_stride, pairs, eps,
    Q_DIM: tl.constexpr, DIM: tl.constexpr, Q_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The key in one program of a row, the query's latent (if Q_DIM) in another."""
    row = tl.program_id(0).to(tl.int64)
    source = x + row * x_stride
    if tl.program_id(1) == 0:
        at = tl.arange(0, BLOCK)
        inside = at < DIM
        value = tl.load(source + Q_DIM + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / DIM + eps)
        own = _normed(source + Q_DIM, kv_norm, at, inside, scale)
        turned = at - (DIM - 2 * pairs)
        is_turned = (turned >= 0) & inside
        partner = _normed(source + Q_DIM, kv_norm, (DIM - 2 * pairs) + (turned ^ 1), is_turned, scale).to(tl.float32)
        pair = row * pairs + (turned >> 1)
        c = tl.load(cos + pair, mask=is_turned, other=1.0)
        s = tl.load(sin + pair, mask=is_turned, other=0.0)
        s = tl.where((turned & 1) == 0, -s, s)  # even: e c - o s; odd: o c + e s
        rotated = (own.to(tl.float32) * c + partner * s).to(own.dtype)
        tl.store(kv_out + row * DIM + at, tl.where(is_turned, rotated, own), mask=inside)
    else:
        q_at = tl.arange(0, Q_BLOCK)
        q_inside = q_at < Q_DIM
        q_value = tl.load(source + q_at, mask=q_inside, other=0.0).to(tl.float32)
        q_scale = tl.rsqrt(tl.sum(q_value * q_value, axis=0) / Q_DIM + eps)
        tl.store(q_out + row * Q_DIM + q_at, _normed(source, q_norm, q_at, q_inside, q_scale), mask=q_inside)


@backend("norm_latents", "cuda")
def norm_latents(
    x: Tensor, q_norm: Tensor, kv_norm: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    if not covered(x, q_norm, kv_norm) or cos.dtype is not torch.float32 or sin.dtype is not torch.float32:
        return NotImplemented
    x, stride = rows_of(x)
    n, q_dim, dim = x.shape[0], len(q_norm), len(kv_norm)
    kv = torch.empty(n, dim, dtype=x.dtype, device=x.device)
    q = torch.empty(n, q_dim, dtype=x.dtype, device=x.device)
    block, q_block = triton.next_power_of_2(dim), triton.next_power_of_2(max(q_dim, 1))
    _norm_latents[(n, 2 if q_dim else 1)](
        x, q_norm.contiguous(), kv_norm.contiguous(), cos.contiguous(), sin.contiguous(), q, kv, stride, cos.shape[-1],
        eps, Q_DIM=q_dim, DIM=dim, Q_BLOCK=q_block, BLOCK=block, num_warps=min(max(max(block, q_block) // 512, 1), 8),
    )  # fmt: skip
    return q, kv


@backend("norm_rope", "cuda")
def norm_rope(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    parts = norm_latents(x, weight[:0], weight, eps, cos, sin)
    return parts if parts is NotImplemented else parts[1]


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
