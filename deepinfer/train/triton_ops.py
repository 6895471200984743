"""Two Triton kernels that training needs and that `torch.compile` cannot make: Sinkhorn with its gradient, exact top-k.

Both keep one row of work in registers; Sinkhorn saves its row and column sums (4 floats each) so that the backward
pass can walk the iterations in reverse instead of storing every 4 x 4 matrix.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sinkhorn_forward(logits, out, sums, tokens, eps, STEPS: tl.constexpr, HC: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    alive = token < tokens
    row, col = tl.arange(0, HC), tl.arange(0, HC)
    at = token[:, None, None] * (HC * HC) + row[None, :, None] * HC + col[None, None, :]
    c = tl.load(logits + at, mask=alive[:, None, None], other=0.0)
    c = tl.exp(c - tl.max(c, axis=2)[:, :, None])
    c = c / tl.sum(c, axis=2)[:, :, None] + eps
    base = sums + token[:, None] * (STEPS * HC) + row[None, :]
    for step in range(STEPS):
        if step % 2 == 0:  # columns first: the softmax was the row step
            s = tl.sum(c, axis=1) + eps
            c = c / s[:, None, :]
        else:
            s = tl.sum(c, axis=2) + eps
            c = c / s[:, :, None]
        tl.store(base + step * HC, s, mask=alive[:, None])
    tl.store(out + at, c, mask=alive[:, None, None])


@triton.jit
def _sinkhorn_backward(grad, out, sums, into, tokens, eps, STEPS: tl.constexpr, HC: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    alive = token < tokens
    row, col = tl.arange(0, HC), tl.arange(0, HC)
    at = token[:, None, None] * (HC * HC) + row[None, :, None] * HC + col[None, None, :]
    g = tl.load(grad + at, mask=alive[:, None, None], other=0.0)
    c = tl.load(out + at, mask=alive[:, None, None], other=0.0)
    base = sums + token[:, None] * (STEPS * HC) + row[None, :]
    for back in range(STEPS):
        step = STEPS - 1 - back
        s = tl.load(base + step * HC, mask=alive[:, None], other=1.0)
        if step % 2 == 0:
            g = (g - tl.sum(g * c, axis=1)[:, None, :]) / s[:, None, :]
            c = c * s[:, None, :]
        else:
            g = (g - tl.sum(g * c, axis=2)[:, :, None]) / s[:, :, None]
            c = c * s[:, :, None]
    p = c - eps
    g = p * (g - tl.sum(g * p, axis=2)[:, :, None])
    tl.store(into + at, g, mask=alive[:, None, None])


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, eps: float) -> Tensor:
        logits = logits.contiguous()
        hc = logits.shape[-1]
        tokens, steps = logits.numel() // (hc * hc), 2 * iterations - 1
        out = torch.empty_like(logits)
        sums = torch.empty(tokens * steps * hc, dtype=logits.dtype, device=logits.device)
        _sinkhorn_forward[(triton.cdiv(tokens, 64),)](logits, out, sums, tokens, eps, steps, hc, 64)
        ctx.save_for_backward(out, sums)
        ctx.steps, ctx.eps = steps, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        out, sums = ctx.saved_tensors
        hc = out.shape[-1]
        tokens, into = out.numel() // (hc * hc), torch.empty_like(out)
        _sinkhorn_backward[(triton.cdiv(tokens, 64),)](
            grad.contiguous(), out, sums, into, tokens, ctx.eps, ctx.steps, hc, 64
        )
        return into, None, None


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Softmax and column step, then `iterations - 1` row and column steps. float32 [..., hc, hc], hc a power of two."""
    return _Sinkhorn.apply(logits, iterations, eps)


@triton.jit
def _top_k_kernel(scores, out, width, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x = tl.load(scores + row * width + col, mask=col < width, other=float("-inf"))
    alive = x > float("-inf")
    x = tl.where(x == 0.0, 0.0, x)  # -0 and 0 are one value
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # orders like the floats
    # The k-th largest key, bit by bit from the sign down: keep a bit if at least k keys reach the candidate.
    threshold = tl.where(tl.sum((key >= 0).to(tl.int32), axis=0) >= k, 0, -2147483648)
    for i in range(31):
        candidate = threshold + (1 << (30 - i))
        enough = tl.sum((key >= candidate).to(tl.int32), axis=0) >= k
        threshold = tl.where(enough, candidate, threshold)
    above = (key > threshold) & alive
    equal = (key == threshold) & alive
    room = k - tl.sum(above.to(tl.int32), axis=0)
    rank = tl.cumsum(equal.to(tl.int32), axis=0)  # ties go to the lowest index
    chosen = above | (equal & (rank <= room))
    tl.store(out + row * width + col, chosen, mask=col < width)


def top_k_mask(scores: Tensor, k: int) -> Tensor:
    """True at the k largest finite scores of each row, ties to the lowest index. float32 [..., G] -> bool [..., G]."""
    scores = scores.contiguous()
    width = scores.shape[-1]
    out = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    rows = scores.numel() // width
    block = triton.next_power_of_2(width)
    _top_k_kernel[(rows,)](scores, out, width, k, block, num_warps=max(1, min(4, block // 1024)))
    return out
