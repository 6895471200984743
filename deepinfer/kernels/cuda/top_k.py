"""Exact selection without sorting: the k-th largest value of a row by radix select on the bits of its floats."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.common import covered
from deepinfer.kernels.reference import indexer  # noqa: F401  (defines the operation)
from deepinfer.kernels.registry import backend

TILE = 4096
LOWEST = tl.constexpr(0x007FFFFF)  # ordered bits of -inf


@triton.jit
def ordered_bits(x):
    """uint32 that orders as the floats do; both zeros are equal, NaN is above all."""
    bits = tl.where(x == 0, 0.0, x).to(tl.float32).to(tl.uint32, bitcast=True)
    bits = tl.where(x != x, 0x7FFFFFFF, bits)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def kth_largest(row, width, k, DIGITS: tl.constexpr, TILE: tl.constexpr):
    """Ordered bits of the k-th largest of width floats at row (1 <= k <= width), and how many equal ones are among
    the k largest. DIGITS: bytes of the ordered bits that differ (2 for BF16 values)."""
    prefix = tl.zeros((), tl.uint32)
    wanted = k
    bins = tl.arange(0, 256)
    for digit in tl.static_range(DIGITS):
        shift = 24 - 8 * digit
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, width, TILE):
            at = start + tl.arange(0, TILE)
            key = ordered_bits(tl.load(row + at, mask=at < width, other=float("-inf")).to(tl.float32))
            if digit > 0:
                taken = (at < width) & ((key >> (shift + 8)) == prefix)
            else:
                taken = at < width
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=taken)
        # The digit is the highest one that still has `wanted` keys at or above it.
        at_or_above = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        chosen = tl.max(tl.where(at_or_above >= wanted, bins, 0), axis=0)
        wanted -= tl.sum(tl.where(bins > chosen, counts, 0), axis=0)
        prefix = (prefix << 8) | chosen.to(tl.uint32)
    return prefix << (32 - 8 * DIGITS), wanted


@triton.jit
def _top_k(scores, out, stride, width, k, DIGITS: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = scores + row * stride
    target = out + row * k
    threshold, equal_wanted = kth_largest(source, width, tl.minimum(k, width), DIGITS, TILE)
    # Fewer than k scores above -inf: all of them.
    equal_wanted = tl.where(threshold <= LOWEST, 0, equal_wanted)
    threshold = tl.maximum(threshold, tl.full((), LOWEST, tl.uint32))
    written = 0
    equal_seen = 0
    for start in range(0, width, TILE):
        at = start + tl.arange(0, TILE)
        key = ordered_bits(tl.load(source + at, mask=at < width, other=float("-inf")).to(tl.float32))
        equal = (key == threshold).to(tl.int32)
        rank = equal_seen + tl.cumsum(equal, axis=0)
        chosen = (at < width) & ((key > threshold) | ((equal > 0) & (rank <= equal_wanted)))
        place = written + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(target + place, at, mask=chosen)
        written += tl.sum(chosen.to(tl.int32), axis=0)
        equal_seen += tl.sum(equal, axis=0)
    for start in range(0, k, PADDED):
        place = start + tl.arange(0, PADDED)
        tl.store(target + place, tl.full((PADDED,), -1, tl.int32), mask=(place >= written) & (place < k))


@backend("top_k_positions", "cuda")
def top_k_positions(scores: Tensor, k: int) -> Tensor:
    if not covered(scores):
        return NotImplemented
    n, width = scores.shape
    if width == 0:
        return torch.full((n, k), -1, dtype=torch.int32, device=scores.device)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    out = torch.empty(n, k, dtype=torch.int32, device=scores.device)
    digits = 2 if scores.dtype is torch.bfloat16 else 4
    tile = min(TILE, max(triton.next_power_of_2(width), 128))
    _top_k[(n,)](scores, out, scores.stride(0), width, k, DIGITS=digits, TILE=tile, PADDED=512, num_warps=16)
    return out
