"""Engram: n-gram hashes, and the gate into the streams."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.common import contiguous, covered, rows_of
from deepinfer.kernels.reference import engram  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend


@triton.jit(do_not_specialize=["n", "kept_ids"])
def _ngrams(
    token_ids, token_map, history, states, sources, out, n, kept_ids, history_stride, size, length,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n * length
    source = tl.load(sources + at, mask=inside, other=0)
    is_new = inside & (source < n)
    is_kept = inside & (source >= n) & (source < n + kept_ids)
    token = tl.load(token_ids + source, mask=is_new, other=0)
    new = tl.load(token_map + token, mask=is_new, other=0)
    place = tl.maximum(source - n, 0)
    state = tl.load(states + place // size, mask=is_kept, other=0)
    kept = tl.load(history + state * history_stride + place % size, mask=is_kept, other=-1)
    tl.store(out + at, tl.where(is_new, new, kept), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _keep_ids(
    token_ids, token_map, history, rows, slots, places, count, history_stride, ALL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = at if ALL else tl.load(rows + at, mask=inside, other=0)
    token = tl.load(token_ids + row, mask=inside, other=0)
    target = history + tl.load(slots + at, mask=inside, other=0) * history_stride
    target += tl.load(places + at, mask=inside, other=0)
    tl.store(target, tl.load(token_map + token, mask=inside, other=0), mask=inside)


@backend("ngram_ids", "cuda")
def ngram_ids(
    token_ids: Tensor,
    token_map: Tensor,
    history: Tensor,
    state_slots: Tensor,
    sources: Tensor,
    kept_rows: Tensor | None,
    kept_slots: Tensor,
    kept_places: Tensor,
) -> Tensor:
    (n, length), size, count = sources.shape, history.shape[1], len(kept_slots)
    rows = kept_slots if kept_rows is None else kept_rows
    token_ids, states, sources = contiguous(token_ids, state_slots, sources)
    out = torch.empty(n, length, dtype=torch.int64, device=history.device)
    if n:
        _ngrams[(triton.cdiv(n * length, 128),)](
            token_ids, token_map, history, states, sources, out, n, len(states) * size,
            history.stride(0), size, length, BLOCK=128, num_warps=4,
        )  # fmt: skip
    if count:  # behind the launch above, which reads what is overwritten here
        _keep_ids[(triton.cdiv(count, 128),)](
            token_ids, token_map, history, *contiguous(rows, kept_slots, kept_places), count, history.stride(0),
            ALL=kept_rows is None, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return out


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
        *contiguous(history, multipliers, primes, offsets), out, n, pad,
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
