"""mHC: post-mix, coefficients and pre-mix in two kernels.

The first streams h once. For some tokens and channels it makes h' (post-mix), the mix-in sum(p_prev h'), and the
product of h' with `fn` on the spot; each program leaves its share of the products and of the sums of squares. The
second adds the shares of a token in a fixed order, runs Sinkhorn on its matrix in registers and norms the mix-in.
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
CHANNELS = 64  # of one step of the first kernel
PROGRAMS = 640  # of the first kernel: a few a multiprocessor
MAX_PARTS = 128  # shares of a token


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
def _add_product(value, weights, total):
    """total + value @ weights, with the float32 weights exact: as three BF16 terms where the values are BF16."""
    if value.dtype == tl.bfloat16:
        for _ in tl.static_range(3):
            term = weights.to(tl.bfloat16)
            total = tl.dot(value, term, total)
            weights = weights - term.to(tl.float32)
    else:
        total = tl.dot(value, weights, total, input_precision="ieee")
    return total


@triton.jit
def _mix(
    h, y, post, comb, p_prev, fn, after, mixed_out, shares, n, steps,
    dim: tl.constexpr, POST: tl.constexpr, HC: tl.constexpr, MIXES: tl.constexpr, PADDED: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """shares[part, token] = this program's part of fn @ h', sum(h'^2) and sum(mix-in^2). POST: h' is made here."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    part = tl.program_id(1)
    alive = token < n
    mix = tl.arange(0, PADDED)
    total = tl.zeros((TOKENS, PADDED), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    mixed_squares = tl.zeros((TOKENS,), tl.float32)
    DTYPE: tl.constexpr = h.dtype.element_ty
    for step in range(steps):
        at = (part * steps + step) * CHANNELS + tl.arange(0, CHANNELS)
        inside = alive[:, None] & (at < dim)[None, :]
        place = token[:, None] * (HC * dim) + at[None, :]
        column = fn + mix[None, :] * (HC * dim) + at[:, None]
        inside_fn = (at < dim)[:, None] & (mix < MIXES)[None, :]
        streams = ()
        weights = ()
        for i in tl.static_range(HC):  # all loads before the first store
            streams = streams + (tl.load(h + place + i * dim, mask=inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
            weights = weights + (tl.load(column + i * dim, mask=inside_fn, other=0.0),)  # type: ignore[assignment]
        if POST:
            output = tl.load(y + token[:, None] * dim + at[None, :], mask=inside, other=0.0).to(tl.float32)
        mixed = tl.zeros((TOKENS, CHANNELS), tl.float32)
        for j in tl.static_range(HC):
            if POST:
                value = tl.load(post + token * HC + j, mask=alive, other=0.0)[:, None] * output
                for i in tl.static_range(HC):
                    share = tl.load(comb + token * (HC * HC) + i * HC + j, mask=alive, other=0.0)
                    value += share[:, None] * streams[i]
                tl.store(after + place + j * dim, value.to(DTYPE), mask=inside)
            else:
                value = streams[j]
            rounded = value.to(DTYPE)
            value = rounded.to(tl.float32)
            squares += tl.sum(value * value, axis=1)
            mixed += tl.load(p_prev + token * HC + j, mask=alive, other=0.0)[:, None] * value
            total = _add_product(rounded, weights[j], total)
        rounded = mixed.to(DTYPE)
        tl.store(mixed_out + token[:, None] * dim + at[None, :], rounded, mask=inside)
        mixed = rounded.to(tl.float32)
        mixed_squares += tl.sum(mixed * mixed, axis=1)
    total = tl.where(mix[None, :] == MIXES, squares[:, None], total)
    total = tl.where(mix[None, :] == MIXES + 1, mixed_squares[:, None], total)
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
    mixed_squares = tl.sum(tl.load(own + MIXES + 1, mask=ok_part, other=0.0), axis=0)
    vector = own[:, None] + j[None, :]
    in_vector = ok_part[:, None] & ok[None, :]
    first = tl.sum(tl.load(vector, mask=in_vector, other=0.0), axis=0)
    second = tl.sum(tl.load(vector + HC, mask=in_vector, other=0.0), axis=0)
    matrix = own[:, None, None] + 2 * HC + cell[None, :, :]
    third = tl.sum(tl.load(matrix, mask=ok_part[:, None, None] & both[None, :, :], other=0.0), axis=0)

    value = weight * (mixed * tl.rsqrt(mixed_squares / dim + rms_eps))
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
    mixes = hc * (2 + hc)
    padded = max(triton.next_power_of_2(mixes + 2), 16)
    tokens = 16 if n <= 512 or h.dtype is torch.float32 else 32
    # Few tokens: split the channels over many programs. Many tokens: they fill the device by themselves.
    token_blocks, blocks = triton.cdiv(n, tokens), triton.cdiv(dim, CHANNELS)
    steps = triton.cdiv(blocks, min(blocks, triton.cdiv(PROGRAMS, max(token_blocks, 1)), MAX_PARTS))
    parts = triton.cdiv(blocks, steps)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=h.device)

    shares, mixed, after = new(parts, n, padded), new(n, dim, dtype=h.dtype), h
    if y is not None:
        y, post, comb, after = y.contiguous(), post.contiguous(), comb.contiguous(), torch.empty_like(h)
    _mix[(token_blocks, parts)](
        h, y, post, comb, p_prev, fn, after, mixed, shares, n, steps, dim,
        POST=y is not None, HC=hc, MIXES=mixes, PADDED=padded, TOKENS=tokens, CHANNELS=CHANNELS, num_stages=1,
    )  # fmt: skip
    x = new(n, dim, dtype=h.dtype)
    new_pre, new_post, new_comb = new(n, hc), new(n, hc), new(n, hc, hc)
    block = triton.next_power_of_2(dim)
    _coefficients[(n,)](
        mixed, shares, scale, base, norm_weight.contiguous(), x, new_pre, new_post, new_comb, n, parts,
        sinkhorn_iters, hc_eps, rms_eps, dim,
        HC=hc, SIDE=triton.next_power_of_2(hc), PADDED=padded, PARTS=triton.next_power_of_2(parts), BLOCK=block,
        num_warps=min(max(block // 2048, 1), 4),
    )  # fmt: skip
    return after, x, new_pre, new_post, new_comb
