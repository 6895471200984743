"""mHC: post-mix, coefficients and pre-mix in two kernels.

The first streams h once: it makes h' (post-mix) for some tokens and channels and multiplies it with `fn` on the spot,
each program leaving its share of the products and of the sum of squares. The second adds the shares in a fixed order,
runs Sinkhorn on one token's matrix in registers and norms the mix-in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.common import covered
from deepinfer.kernels.reference import hyper_connection  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend

MAX_HC = 8
TOKENS = 16  # of one program of the first kernel
CHANNELS = 64


@triton.jit
def _hc_post(h, y, post, comb, out, dim, HC: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < dim
    value = tl.load(y + row * dim + at, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(HC):
        mixed = tl.load(post + row * HC + j) * value
        for i in tl.static_range(HC):
            stream = tl.load(h + (row * HC + i) * dim + at, mask=inside, other=0.0).to(tl.float32)
            mixed += tl.load(comb + row * HC * HC + i * HC + j) * stream
        tl.store(out + (row * HC + j) * dim + at, mixed.to(out.dtype.element_ty), mask=inside)


@backend("hc_post", "cuda")
def hc_post(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    n, hc, dim = h.shape
    if not covered(h, y) or post.dtype is not torch.float32 or hc > MAX_HC:
        return NotImplemented
    h, y, post, comb = (t.contiguous() for t in (h, y, post, comb))
    out = torch.empty_like(h)
    block = min(triton.next_power_of_2(dim), 1024)
    _hc_post[(n, triton.cdiv(dim, block))](h, y, post, comb, out, dim, HC=hc, BLOCK=block)
    return out


@triton.jit
def _mix_products(
    h, y, post, comb, fn, after, products, n, dim, channels,
    POST: tl.constexpr, HC: tl.constexpr, MIXES: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """products[part, token, :] = this program's share of fn @ h', then of sum(h'^2). POST: h' is made here."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    part = tl.program_id(1)
    alive = token < n
    mix = tl.arange(0, PADDED)
    total = tl.zeros((TOKENS, PADDED), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for start in range(part * channels, tl.minimum((part + 1) * channels, dim), CHANNELS):
        at = start + tl.arange(0, CHANNELS)
        inside = alive[:, None] & (at < dim)[None, :]
        for j in tl.static_range(HC):
            place = (token[:, None] * HC + j) * dim + at[None, :]
            if POST:
                weight = tl.load(post + token * HC + j, mask=alive, other=0.0)
                value = tl.load(y + token[:, None] * dim + at[None, :], mask=inside, other=0.0).to(tl.float32)
                mixed = weight[:, None] * value
                for i in tl.static_range(HC):
                    weight = tl.load(comb + token * HC * HC + i * HC + j, mask=alive, other=0.0)
                    stream = tl.load(h + (token[:, None] * HC + i) * dim + at[None, :], mask=inside, other=0.0)
                    mixed += weight[:, None] * stream.to(tl.float32)
                rounded = mixed.to(after.dtype.element_ty)
                tl.store(after + place, rounded, mask=inside)
                mixed = rounded.to(tl.float32)
            else:
                mixed = tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
            squares += tl.sum(mixed * mixed, axis=1)
            column = fn + mix[None, :] * (HC * dim) + j * dim + at[:, None]
            weights = tl.load(column, mask=(at < dim)[:, None] & (mix < MIXES)[None, :], other=0.0)
            total = tl.dot(mixed, weights, total, input_precision="tf32x3")
    total = tl.where(mix[None, :] == MIXES, squares[:, None], total)
    target = products + (part * n + token[:, None]) * PADDED + mix[None, :]
    tl.store(target, total, mask=alive[:, None] & (mix <= MIXES)[None, :])


@triton.jit
def _add_parts(products, parts, n, row, index, mask, PADDED: tl.constexpr):
    total = tl.load(products + row * PADDED + index, mask=mask, other=0.0)
    for part in range(1, parts):
        total += tl.load(products + (part * n + row) * PADDED + index, mask=mask, other=0.0)
    return total


@triton.jit
def _mix_in(
    h, p_prev, products, scale, base, norm_weight, x, pre, post, comb, n, dim, parts, steps, hc_eps, rms_eps,
    HC: tl.constexpr, SIDE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Coefficients of one token from the added products, and its normed mix-in."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < dim
    mixed = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(HC):
        stream = tl.load(h + (row * HC + i) * dim + at, mask=inside, other=0.0).to(tl.float32)
        mixed += tl.load(p_prev + row * HC + i) * stream
    mixed = mixed.to(h.dtype.element_ty).to(tl.float32)
    norm = tl.rsqrt(tl.sum(mixed * mixed, axis=0) / dim + rms_eps)
    value = tl.load(norm_weight + at, mask=inside, other=0.0).to(tl.float32) * (mixed * norm)
    tl.store(x + row * dim + at, value.to(x.dtype.element_ty), mask=inside)

    j = tl.arange(0, SIDE)
    one = tl.arange(0, 1)
    ok = j < HC
    squares = tl.sum(_add_parts(products, parts, n, row, HC * (2 + HC) + one, one < 1, PADDED), axis=0)
    factor = tl.rsqrt(squares / (HC * dim) + rms_eps)
    u = _add_parts(products, parts, n, row, j, ok, PADDED) * factor
    u = u * tl.load(scale) + tl.load(base + j, mask=ok, other=0.0)
    tl.store(pre + row * HC + j, 1.0 / (1.0 + tl.exp(-u)) + hc_eps, mask=ok)
    u = _add_parts(products, parts, n, row, HC + j, ok, PADDED) * factor
    u = u * tl.load(scale + 1) + tl.load(base + HC + j, mask=ok, other=0.0)
    tl.store(post + row * HC + j, 2.0 / (1.0 + tl.exp(-u)), mask=ok)

    cell = j[:, None] * HC + j[None, :]
    both = ok[:, None] & ok[None, :]
    u = _add_parts(products, parts, n, row, 2 * HC + cell, both, PADDED) * factor
    u = u * tl.load(scale + 2) + tl.load(base + 2 * HC + cell, mask=both, other=0.0)
    u = tl.where(ok[None, :], u, float("-inf"))
    c = tl.exp(u - tl.max(u, axis=1)[:, None])
    c = tl.where(both, c / tl.sum(c, axis=1)[:, None] + hc_eps, 0.0)
    c = c / (tl.sum(c, axis=0)[None, :] + hc_eps)
    for _ in range(steps - 1):
        c = c / (tl.sum(c, axis=1)[:, None] + hc_eps)
        c = c / (tl.sum(c, axis=0)[None, :] + hc_eps)
    tl.store(comb + row * HC * HC + cell, c, mask=both)


@backend("hc_pre", "cuda")
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
    mixed = _enter(h, None, None, None, p_prev, fn, scale, base, norm_weight, sinkhorn_iters, hc_eps, rms_eps)
    return mixed if mixed is NotImplemented else mixed[1:]


@backend("hc_post_pre", "cuda")
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
    return _enter(h, y, post, comb, p_prev, fn, scale, base, norm_weight, sinkhorn_iters, hc_eps, rms_eps)


def _enter(h, y, post, comb, p_prev, fn, scale, base, norm_weight, sinkhorn_iters, hc_eps, rms_eps):
    n, hc, dim = h.shape
    wide = (p_prev, fn, scale, base)
    if not covered(h, norm_weight) or any(t.dtype is not torch.float32 for t in wide) or hc > MAX_HC:
        return NotImplemented
    h, p_prev, fn, scale, base = (t.contiguous() for t in (h, *wide))
    mixes = hc * (2 + hc)
    padded = max(triton.next_power_of_2(mixes + 1), 16)
    # Few tokens: split the channels over many programs. Many tokens: they fill the device by themselves.
    blocks = triton.cdiv(dim, CHANNELS)
    parts = max(min(blocks, 160 // max(triton.cdiv(n, TOKENS), 1)), 1)
    channels = triton.cdiv(blocks, parts) * CHANNELS
    parts = triton.cdiv(dim, channels)

    def new(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=h.device)

    products, after = new(parts, n, padded), h
    if y is not None:
        y, post, comb, after = y.contiguous(), post.contiguous(), comb.contiguous(), torch.empty_like(h)
    _mix_products[(triton.cdiv(n, TOKENS), parts)](
        h, y, post, comb, fn, after, products, n, dim, channels,
        POST=y is not None, HC=hc, MIXES=mixes, PADDED=padded, TOKENS=TOKENS, CHANNELS=CHANNELS, num_stages=1,
    )  # fmt: skip
    x = torch.empty(n, dim, dtype=h.dtype, device=h.device)
    new_pre, new_post, new_comb = new(n, hc), new(n, hc), new(n, hc, hc)
    block = triton.next_power_of_2(dim)
    _mix_in[(n,)](
        after, p_prev, products, scale, base, norm_weight.contiguous(), x, new_pre, new_post, new_comb, n, dim, parts,
        sinkhorn_iters, hc_eps, rms_eps,
        HC=hc, SIDE=triton.next_power_of_2(hc), PADDED=padded, BLOCK=block, num_warps=min(max(block // 1024, 1), 8),
    )  # fmt: skip
    return after, x, new_pre, new_post, new_comb
