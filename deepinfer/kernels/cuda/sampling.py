"""The fused sampler: temperature, top-k, top-p, min-p and the draw in one kernel, one program a row.

Rows that keep few candidates draw from those, which `select_top_k` has picked; the others from the whole row. A pass
over a row leaves the weight of every block of 512 tokens in a scratch row: a draw looks at the blocks' cumulative sum,
then at one block. The nucleus is never computed: a token that was drawn is accepted if less than top_p of all weight
lies above it, else the next draw is among the tokens above it (see kernels/reference/sampling.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.top_k import LARGEST_K, select_top_k
from deepinfer.kernels.reference import sampling  # noqa: F401  (defines the operation)
from deepinfer.kernels.registry import backend

BLOCK = 512  # tokens whose weights are added up together
BLOCKS = 16  # blocks of one tile
NUM_WARPS = 16


@triton.jit
def _mix64(z):
    z += 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed, counter):
    """float64 in [0, 1) of two uint64."""
    z = _mix64(_mix64(seed) + counter * 0x9E3779B97F4A7C15) >> 24
    return z.to(tl.int64).to(tl.float64) * 9.094947017729282e-13


@triton.jit
def _weights(row, ids, at, width, largest, heat, MAPPED: tl.constexpr):
    """exp((logit - largest) / heat) of the candidates at `at`, 0 past the last. MAPPED: they are at ids (-1: none)."""
    if MAPPED:
        token = tl.load(ids + at, mask=at < width, other=-1)
        value = tl.load(row + token, mask=token >= 0, other=float("-inf"))
    else:
        value = tl.load(row + at, mask=at < width, other=float("-inf"))
    return tl.exp(tl.div_rn(value - largest, tl.broadcast_to(heat, value.shape)))


@triton.jit
def _add_up(
    row, ids, sums, width, largest, heat, least, above,
    MAPPED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """sums[block] = weight of its tokens that weigh at least `least` and more than `above`; returns that of all."""
    every = tl.zeros((BLOCKS,), tl.float64)
    for start in range(0, width, BLOCK * BLOCKS):
        at = start + tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        weight = _weights(row, ids, at, width, largest, heat, MAPPED)
        every += tl.sum(weight, axis=1).to(tl.float64)
        drawable = tl.where((weight >= least) & (weight > above), weight, 0.0)
        tl.store(sums + start // BLOCK + tl.arange(0, BLOCKS), tl.sum(drawable, axis=1).to(tl.float64))
    tl.debug_barrier()
    return tl.sum(every, axis=0)


@triton.jit
def _draw_from(
    row, ids, sums, width, largest, heat, share, least, seed, counter,
    MAPPED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Index of the token drawn among `width` candidates."""
    every = _add_up(row, ids, sums, width, largest, heat, least, -1.0, MAPPED, BLOCK, BLOCKS)
    blocks = tl.cdiv(width, BLOCK)
    allowed_above = share * every
    above = tl.full((), -1.0, tl.float32)
    block_at = tl.arange(0, PADDED)
    inner = tl.arange(0, BLOCK)
    index = 0
    pending = 1
    while pending > 0:
        block_sums = tl.load(sums + block_at, mask=block_at < blocks, other=0.0)
        ends = tl.cumsum(block_sums, axis=0)
        target = _uniform(seed, counter) * tl.max(ends, axis=0)
        last_block = tl.max(tl.where(block_sums > 0, block_at, 0), axis=0)
        block = tl.minimum(tl.sum((ends <= target).to(tl.int32), axis=0), last_block)
        begin = tl.sum(tl.where(block_at == block - 1, ends, 0.0), axis=0)
        weight = _weights(row, ids, block * BLOCK + inner, width, largest, heat, MAPPED)
        weight = tl.where((weight >= least) & (weight > above), weight, 0.0)
        inside = tl.cumsum(weight.to(tl.float64), axis=0)
        # A block's sum rounds otherwise than its cumulative sum: stay below the latter.
        target = tl.minimum(target - begin, tl.max(inside, axis=0) * (1.0 - 9.094947017729282e-13))
        chosen = tl.sum((inside <= target).to(tl.int32), axis=0)
        index = tl.minimum(block * BLOCK + chosen, width - 1)
        pending = 0
        if share < 1:
            above = tl.sum(tl.where(inner == chosen, weight, 0.0), axis=0)
            tl.debug_barrier()
            _add_up(row, ids, sums, width, largest, heat, least, above, MAPPED, BLOCK, BLOCKS)
            weight_above = tl.sum(tl.load(sums + block_at, mask=block_at < blocks, other=0.0), axis=0)
            pending = ((weight_above >= allowed_above) & (weight_above > 0)).to(tl.int32)
            counter += 1 << 40
    return index


@triton.jit
def _draw(
    logits, candidates, temperature, num_candidates, top_p, min_p, seeds, counters, scratch, tokens, largest_out,
    stride, width, most_candidates,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    sums = scratch + index * PADDED
    TILE: tl.constexpr = BLOCK * BLOCKS
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_at = tl.full((TILE,), 0, tl.int32)
    broken = tl.zeros((TILE,), tl.int32)
    for start in range(0, width, TILE):
        at = start + tl.arange(0, TILE)
        value = tl.load(row + at, mask=at < width, other=float("-inf"))
        broken = broken | (value != value).to(tl.int32)
        best_at = tl.where(value > best, at, best_at)
        best = tl.where(value > best, value, best)
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, best_at, width - 1), axis=0)
    is_broken = (tl.max(broken, axis=0) > 0) | (tl.abs(largest) == float("inf"))
    tl.store(largest_out + index, tl.where(tl.max(broken, axis=0) > 0, float("nan"), largest))

    chosen_heat = tl.load(temperature + index)
    if (chosen_heat > 0) & (is_broken == 0):
        heat = tl.maximum(chosen_heat, 1.1754943508222875e-38).to(tl.float32)
        least = tl.load(min_p + index).to(tl.float32)
        share = tl.load(top_p + index)
        seed = tl.load(seeds + index).to(tl.uint64, bitcast=True)
        counter = tl.load(counters + index).to(tl.uint64, bitcast=True)
        count = tl.load(num_candidates + index).to(tl.int32)
        ids = candidates + index * most_candidates
        if count < width:
            place = _draw_from(
                row, ids, sums, count, largest, heat, share, least, seed, counter, True, BLOCK, BLOCKS, PADDED
            )  # fmt: skip
            token = tl.load(ids + place)
        else:
            token = _draw_from(
                row, ids, sums, width, largest, heat, share, least, seed, counter, False, BLOCK, BLOCKS, PADDED
            )  # fmt: skip
    tl.store(tokens + index, token.to(tl.int64))


@backend("draw_tokens", "cuda")
def draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    num_candidates: Tensor,
    most_candidates: int,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
) -> tuple[Tensor, Tensor]:
    if logits.dtype is not torch.float32 or most_candidates > LARGEST_K:
        return NotImplemented
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, width = logits.shape
    num_candidates = num_candidates.contiguous()
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    largest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    candidates = (
        select_top_k(logits, most_candidates, num_candidates)
        if most_candidates
        else tokens.new_empty(0, dtype=torch.int32)
    )
    padded = triton.next_power_of_2(triton.cdiv(width, BLOCK * BLOCKS) * BLOCKS)
    scratch = torch.empty(rows, padded, dtype=torch.float64, device=logits.device)
    parameters = (t.contiguous() for t in (temperature, num_candidates, top_p, min_p, seeds, counters))
    _draw[(rows,)](
        logits, candidates, *parameters, scratch, tokens, largest, logits.stride(0), width, most_candidates,
        BLOCK=BLOCK, BLOCKS=BLOCKS, PADDED=padded, num_warps=NUM_WARPS,
    )  # fmt: skip
    return tokens, largest
