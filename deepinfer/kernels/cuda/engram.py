"""Engram: n-gram hashes, and the gate into the streams."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.common import covered, rows_of
from deepinfer.kernels.reference import engram  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend


@triton.jit
def _hash(
    history, multipliers, primes, offsets, out, n, pad, LENGTH: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    alive = row < n
    head = tl.arange(0, PADDED)
    blocked = tl.zeros((ROWS,), tl.int1)
    running = tl.zeros((ROWS,), tl.int64)
    for step in tl.static_range(LENGTH):
        token = tl.load(history + row * LENGTH + step, mask=alive, other=0)
        blocked = blocked | (token < 0)
        running = running ^ (tl.where(blocked, pad, token) * tl.load(multipliers + step))
        if step > 0:
            at = (step - 1) * HEADS + head
            prime = tl.load(primes + at, mask=head < HEADS, other=1)
            offset = tl.load(offsets + at, mask=head < HEADS, other=0)
            ids = running[:, None] % prime[None, :] + offset[None, :]
            target = out + row[:, None] * ((LENGTH - 1) * HEADS) + at[None, :]
            tl.store(target, ids, mask=alive[:, None] & (head < HEADS)[None, :])


@backend("engram_hash", "cuda")
def engram_hash(history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int) -> Tensor:
    n, length = history.shape
    heads = primes.shape[1]
    out = torch.empty(n, (length - 1) * heads, dtype=torch.int64, device=history.device)
    _hash[(triton.cdiv(n, 32),)](
        history.contiguous(), multipliers.contiguous(), primes.contiguous(), offsets.contiguous(), out, n, pad,
        LENGTH=length, HEADS=heads, PADDED=triton.next_power_of_2(heads), ROWS=32, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _gate(
    h, kv, weight, alive, out, kv_stride, dim, eps, HC: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < dim
    wide = tl.load(h + (row * HC + stream) * dim + at, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(kv + row * kv_stride + stream * dim + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(kv + row * kv_stride + HC * dim + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + stream * dim + at, mask=inside, other=0.0).to(tl.float32)
    norm = tl.rsqrt(tl.sum(wide * wide, axis=0) / dim + eps) * tl.rsqrt(tl.sum(key * key, axis=0) / dim + eps)
    dot = tl.sum(wide * w * key, axis=0) * norm / tl.sqrt(dim.to(tl.float32))
    size = tl.where(tl.abs(dot) < 1e-6, 1e-6, tl.abs(dot))
    root = tl.sqrt(size)
    gate = 1.0 / (1.0 + tl.exp(tl.where(dot < 0, root, -root)))
    if MASKED:
        gate = gate * tl.load(alive + row).to(tl.float32)
    result = wide + gate * value
    tl.store(out + (row * HC + stream) * dim + at, result.to(out.dtype.element_ty), mask=inside)


@backend("engram_gate", "cuda")
def engram_gate(h: Tensor, kv: Tensor, weight: Tensor, alive: Tensor | None, eps: float) -> Tensor:
    if not covered(h, kv, weight):
        return NotImplemented
    n, hc, dim = h.shape
    h = h.contiguous()
    kv, kv_stride = rows_of(kv)
    out = torch.empty_like(h)
    block = triton.next_power_of_2(dim)
    mask = None if alive is None else alive.contiguous().view(torch.uint8)
    _gate[(n, hc)](
        h, kv, weight.contiguous(), mask, out, kv_stride, dim, eps,
        HC=hc, MASKED=mask is not None, BLOCK=block, num_warps=min(max(block // 1024, 1), 8),
    )  # fmt: skip
    return out
