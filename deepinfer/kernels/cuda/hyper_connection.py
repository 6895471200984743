"""mHC: post-mix, coefficients and pre-mix; on Hopper for few tokens in one kernel (tile_kernels), else in three.

The first streams h once and makes h' (post-mix) and the mix-in sum(p_prev h'). The second multiplies h' with `fn`, each
program leaving its share of the products and of the sum of squares. The third adds the shares of a token in a fixed
order, runs Sinkhorn on its matrix in registers and norms the mix-in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.common import covered
from deepinfer.kernels.reference import hyper_connection  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend
from deepinfer.kernels.tile_kernels.hyper_connection import mix_few
from deepinfer.kernels.tile_kernels.mix_streams import FEWEST, mix_many

MAX_HC = 8
PROGRAMS = 528  # of the second kernel: four a multiprocessor
MAX_PARTS = 128  # shares of a token


@triton.jit
def _post_mix(
    h, y, post, comb, p_prev, after, mixed, dim,
    POST: tl.constexpr, MIX_IN: tl.constexpr, HC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """POST: after = the post-mixed streams, else they are h. MIX_IN: mixed = their sum weighted by p_prev."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < dim
    total = tl.zeros((BLOCK,), tl.float32)
    if POST:
        output = tl.load(y + row * dim + at, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(HC):
        if POST:
            value = tl.load(post + row * HC + j) * output
            for i in tl.static_range(HC):
                stream = tl.load(h + (row * HC + i) * dim + at, mask=inside, other=0.0).to(tl.float32)
                value += tl.load(comb + row * HC * HC + i * HC + j) * stream
            value = value.to(h.dtype.element_ty)
            tl.store(after + (row * HC + j) * dim + at, value, mask=inside)
        else:
            value = tl.load(h + (row * HC + j) * dim + at, mask=inside, other=0.0)
        if MIX_IN:
            total += tl.load(p_prev + row * HC + j) * value.to(tl.float32)
    if MIX_IN:
        tl.store(mixed + row * dim + at, total.to(mixed.dtype.element_ty), mask=inside)


@backend("hc_post", "cuda")
def hc_post(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    n, hc, dim = h.shape
    if not covered(h, y) or post.dtype is not torch.float32 or hc > MAX_HC:
        return NotImplemented
    h, y, post, comb = (t.contiguous() for t in (h, y, post, comb))
    out = torch.empty_like(h)
    block = min(triton.next_power_of_2(dim), 1024)
    _post_mix[(n, triton.cdiv(dim, block))](
        h, y, post, comb, post, out, out, dim, POST=True, MIX_IN=False, HC=hc, BLOCK=block
    )
    return out


@triton.jit
def _add_product(value, weights, total):
    """total + value @ weights; float32 weights as two BF16 terms (16 bits) where the values are BF16 (8 bits)."""
    if value.dtype == tl.bfloat16:
        high = weights.to(tl.bfloat16)
        total = tl.dot(value, high, total)
        total = tl.dot(value, (weights - high.to(tl.float32)).to(tl.bfloat16), total)
    else:
        total = tl.dot(value, weights, total, input_precision="ieee")
    return total


@triton.jit
def _products(
    z, fn, shares, n, steps,
    width: tl.constexpr, MIXES: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """shares[part, token] = this program's part of fn @ z (z [n, width]), then of sum(z^2)."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    part = tl.program_id(1)
    alive = token < n
    mix = tl.arange(0, PADDED)
    total = tl.zeros((TOKENS, PADDED), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for step in range(steps):
        at = (part * steps + step) * DEPTH + tl.arange(0, DEPTH)
        value = tl.load(
            z + token[:, None] * width + at[None, :], mask=alive[:, None] & (at < width)[None, :], other=0.0
        )
        inside = (at < width)[:, None] & (mix < MIXES)[None, :]
        weights = tl.load(fn + mix[None, :] * width + at[:, None], mask=inside, other=0.0)
        total = _add_product(value, weights, total)
        squares += tl.sum(value.to(tl.float32) * value.to(tl.float32), axis=1)
    total = tl.where(mix[None, :] == MIXES, squares[:, None], total)
    tl.store(shares + (part * n + token[:, None]) * PADDED + mix[None, :], total, mask=alive[:, None])


@triton.jit
def _coefficients(
    mixed_in, shares, scale, base, norm_weight, x, pre, post, comb, n, parts, iterations, hc_eps, rms_eps,
    dim: tl.constexpr, HC: tl.constexpr, SIDE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Coefficients of one token from its shares, and its normed mix-in."""
    row = tl.program_id(0).to(tl.int64)
    MIXES: tl.constexpr = HC * (2 + HC)
    at = tl.arange(0, BLOCK)
    inside = at < dim
    mixed = tl.load(mixed_in + row * dim + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + at, mask=inside, other=0.0).to(tl.float32)
    part = tl.arange(0, PARTS)
    own = shares + (part * n + row) * PADDED
    ok_part = part < parts
    j = tl.arange(0, SIDE)
    ok = j < HC
    both = ok[:, None] & ok[None, :]
    cell = j[:, None] * HC + j[None, :]
    squares = tl.sum(tl.load(own + MIXES, mask=ok_part, other=0.0), axis=0)
    vector = own[:, None] + j[None, :]
    in_vector = ok_part[:, None] & ok[None, :]
    first = tl.sum(tl.load(vector, mask=in_vector, other=0.0), axis=0)
    second = tl.sum(tl.load(vector + HC, mask=in_vector, other=0.0), axis=0)
    matrix = own[:, None, None] + 2 * HC + cell[None, :, :]
    third = tl.sum(tl.load(matrix, mask=ok_part[:, None, None] & both[None, :, :], other=0.0), axis=0)

    value = weight * (mixed * tl.rsqrt(tl.sum(mixed * mixed, axis=0) / dim + rms_eps))
    tl.store(x + row * dim + at, value.to(x.dtype.element_ty), mask=inside)
    factor = tl.rsqrt(squares / (HC * dim) + rms_eps)
    u = first * factor * tl.load(scale) + tl.load(base + j, mask=ok, other=0.0)
    tl.store(pre + row * HC + j, 1.0 / (1.0 + tl.exp(-u)) + hc_eps, mask=ok)
    u = second * factor * tl.load(scale + 1) + tl.load(base + HC + j, mask=ok, other=0.0)
    tl.store(post + row * HC + j, 2.0 / (1.0 + tl.exp(-u)), mask=ok)
    u = third * factor * tl.load(scale + 2) + tl.load(base + 2 * HC + cell, mask=both, other=0.0)
    u = tl.where(ok[None, :], u, float("-inf"))
    c = tl.exp(u - tl.max(u, axis=1)[:, None])
    c = tl.where(both, c / tl.sum(c, axis=1)[:, None] + hc_eps, 0.0)
    c = c / (tl.sum(c, axis=0)[None, :] + hc_eps)
    for _ in range(iterations - 1):
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
    mix = None if y is None else (y.contiguous(), post.contiguous(), comb.contiguous())
    weights = fn, scale, base, norm_weight.contiguous()
    mixed = (mix_many if n >= FEWEST else mix_few)(h, mix, p_prev, weights, (sinkhorn_iters, hc_eps, rms_eps))
    if mixed is not None:
        return mixed
    mixes = hc * (2 + hc)
    padded = max(triton.next_power_of_2(mixes + 1), 16)
    # Few tokens: split the columns over many programs. Many tokens: they fill the device by themselves.
    tokens, depth = (16, 128) if n <= 512 or h.dtype is torch.float32 else (64, 64)
    token_blocks, blocks = triton.cdiv(n, tokens), triton.cdiv(hc * dim, depth)
    steps = triton.cdiv(blocks, min(blocks, triton.cdiv(PROGRAMS, max(token_blocks, 1)), MAX_PARTS))
    parts = triton.cdiv(blocks, steps)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=h.device)

    shares, mixed_in, after = new(parts, n, padded), new(n, dim, dtype=h.dtype), h
    if y is not None:
        y, post, comb, after = y.contiguous(), post.contiguous(), comb.contiguous(), torch.empty_like(h)
    block = min(triton.next_power_of_2(dim), 1024)
    _post_mix[(n, triton.cdiv(dim, block))](
        h, y, post, comb, p_prev, after, mixed_in, dim, POST=y is not None, MIX_IN=True, HC=hc, BLOCK=block
    )
    _products[(token_blocks, parts)](
        after, fn, shares, n, steps, hc * dim,
        MIXES=mixes, PADDED=padded, TOKENS=tokens, DEPTH=depth, num_stages=1 if h.dtype is torch.float32 else 3,
    )  # fmt: skip
    x = new(n, dim, dtype=h.dtype)
    new_pre, new_post, new_comb = new(n, hc), new(n, hc), new(n, hc, hc)
    block = triton.next_power_of_2(dim)
    _coefficients[(n,)](
        mixed_in, shares, scale, base, norm_weight.contiguous(), x, new_pre, new_post, new_comb, n, parts,
        sinkhorn_iters, hc_eps, rms_eps, dim,
        HC=hc, SIDE=triton.next_power_of_2(hc), PADDED=padded, PARTS=triton.next_power_of_2(parts), BLOCK=block,
        num_warps=min(max(block // 2048, 1), 4),
    )  # fmt: skip
    return after, x, new_pre, new_post, new_comb
