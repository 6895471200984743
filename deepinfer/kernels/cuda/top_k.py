"""Exact selection without sorting.

A row is cut into segments that each fit into the registers of one program. A program bisects on the bits of its floats
for a threshold that leaves between k and 2 k of them, so that a few steps do, and writes those in order. Levels of that
follow until one program can hold what is left of a row: it bisects on to exactly k. Equal scores are taken in the order
of their positions throughout, so the result is that of a stable sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.common import covered
from deepinfer.kernels.deep_select import top_k as deep_select
from deepinfer.kernels.reference import indexer  # noqa: F401  (defines the operation)
from deepinfer.kernels.registry import backend

SEGMENT = 16384  # positions of one program
LARGEST_K = 4096
MOST_ROWS = 65535  # of a launch: the second dimension of a grid
LOWEST = tl.constexpr(0x007FFFFF)  # ordered bits of -inf


@triton.jit
def ordered_bits(x):
    """uint32 that orders as the floats do; both zeros are equal, NaN is 0, below all."""
    bits = tl.where(x == 0, 0.0, x).to(tl.float32).to(tl.uint32, bitcast=True)
    bits = tl.where(x != x, 0xFFFFFFFF, bits)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def choose(key, k, most):
    """bool [T]: between k and `most` of the largest keys uint32 [T] above LOWEST (all, if there are fewer), or exactly
    k where equal ones do not allow that; of equal ones the first."""
    low = tl.full((), LOWEST + 1, tl.uint32)
    high = tl.max(key, axis=0) + 1
    searching = tl.sum((key > LOWEST).to(tl.int32), axis=0) > most
    is_exact = searching  # whether the loop ended on the k-th largest key itself
    while searching:
        middle = low + (high - low) // 2
        count = tl.sum((key >= middle).to(tl.int32), axis=0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle)
        is_exact = (count < k) | (count > most)
        searching = is_exact & (high - low > 1)
    chosen = key >= low
    if is_exact:
        equal = (key == low).to(tl.int32)
        wanted = k - tl.sum((key > low).to(tl.int32), axis=0)
        chosen = (key > low) | ((equal > 0) & (tl.cumsum(equal, axis=0) <= wanted))
    return chosen


@triton.jit
def _select(
    source, source_positions, source_counts, counts, keys_out, positions_out, row_stride, width, k, row_k, ends, most,
    cap, source_cap,
    FIRST: tl.constexpr, LAST: tl.constexpr, ROW_K: tl.constexpr, ENDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One segment of one row. FIRST: source holds floats, else the keys that the level before left in lists of
    source_cap. LAST: exactly k positions, -1 for none; else up to `most` keys and positions in a list of cap."""
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(0)
    at = segment * TILE + tl.arange(0, TILE)
    if ROW_K:
        wanted = tl.minimum(tl.load(row_k + row).to(tl.int32), k)
    else:
        wanted = k
    if FIRST:
        end = tl.minimum(tl.load(ends + row), width) if ENDS else width
        key = ordered_bits(tl.load(source + row * row_stride + at, mask=at < end, other=float("-inf")))
        position = at
    else:
        lists = width // source_cap
        count = tl.load(source_counts + row * lists + at // source_cap, mask=at < width, other=0)
        inside = (at % source_cap) < count
        key = tl.load(source + row * width + at, mask=inside, other=0)
        position = tl.load(source_positions + row * width + at, mask=inside, other=-1)
    if LAST:
        chosen = choose(key, wanted, wanted)
    else:
        chosen = choose(key, wanted, tl.maximum(most, wanted))
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    total = tl.sum(chosen.to(tl.int32), axis=0)
    if LAST:
        target = positions_out + row * k
        tl.store(target + place, position, mask=chosen)
        for start in range(0, k, 512):
            rest = start + tl.arange(0, 512)
            tl.store(target + rest, tl.full((512,), -1, tl.int32), mask=(rest >= total) & (rest < k))
    else:
        segments = tl.num_programs(0)
        target = (row * segments + segment) * cap
        tl.store(keys_out + target + place, key, mask=chosen)
        tl.store(positions_out + target + place, position, mask=chosen)
        tl.store(counts + row * segments + segment, total)


def select_top_k(scores: Tensor, k: int, row_k: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
    """Positions int32 [N, k] of the k largest of scores [N, width], ascending, -1 for none.

    row_k int64 [N]: so many, at most k, which is at most LARGEST_K; ends int32 [N]: where rows end. On Hopper in CUDA
    C++ (kernels/deep_select), elsewhere in Triton.
    """
    if len(scores) > MOST_ROWS:
        parts = (slice(first, first + MOST_ROWS) for first in range(0, len(scores), MOST_ROWS))
        of_rows = [
            (scores[p], k, None if row_k is None else row_k[p], None if ends is None else ends[p]) for p in parts
        ]
        return torch.cat([select_top_k(*part) for part in of_rows])
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    chosen = deep_select.select_top_k(scores, k, row_k, ends)
    return select_in_levels(scores, k, row_k, ends) if chosen is None else chosen


def select_in_levels(scores: Tensor, k: int, row_k: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
    """`select_top_k` in Triton; scores has adjacent columns."""
    n, width = scores.shape
    cap = 2 * k if k <= SEGMENT // 8 else k
    out = torch.empty(n, k, dtype=torch.int32, device=scores.device)
    level: tuple[Tensor, Tensor, Tensor] = (scores, out, out)  # keys, positions, lengths of the lists
    source_cap = 1
    first = True
    while True:
        segments = triton.cdiv(width, SEGMENT)
        last = segments == 1
        following = level
        if not last:
            keys = torch.empty(n, segments * cap, dtype=torch.uint32, device=scores.device)
            following = (keys, torch.empty_like(keys, dtype=torch.int32), out.new_empty(n, segments))
        tile = SEGMENT if not last else max(triton.next_power_of_2(width), 128)
        _select[(segments, n)](
            *level, following[2], following[0], out if last else following[1], scores.stride(0), width, k, row_k, ends,
            cap, cap, source_cap, FIRST=first, LAST=last, ROW_K=row_k is not None, ENDS=ends is not None, TILE=tile,
            num_warps=min(max(tile // 512, 4), 16),
        )  # fmt: skip
        if last:
            return out
        level, width, source_cap, first = following, segments * cap, cap, False


@backend("top_k_positions", "cuda")
def top_k_positions(scores: Tensor, k: int) -> Tensor:
    if not covered(scores) or not 0 < k <= LARGEST_K:
        return NotImplemented
    if scores.shape[1] == 0:
        return torch.full((scores.shape[0], k), -1, dtype=torch.int32, device=scores.device)
    return select_top_k(scores, k)


@triton.jit
def _values(scores, chosen, values, positions, stride, k, BY_VALUE: tl.constexpr, PADDED: tl.constexpr):
    """Values of the chosen positions of a row; BY_VALUE: both in the order of the values, equal ones by position."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    inside = at < k
    position = tl.load(chosen + row * k + at, mask=inside, other=-1)
    if BY_VALUE:
        value = tl.load(scores + row * stride + position, mask=position >= 0, other=float("-inf")).to(tl.float32)
        rank = (ordered_bits(value) ^ 0xFFFFFFFF).to(
            tl.uint64
        ) << 32  # unused ones are last: -1 is the largest position
        ranked = tl.sort(rank | position.to(tl.uint32, bitcast=True).to(tl.uint64))
        position = (ranked & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
        tl.store(positions + row * k + at, position, mask=inside)
    value = tl.load(scores + row * stride + position, mask=position >= 0, other=float("-inf"))
    tl.store(values + row * k + at, value, mask=inside)


@backend("top_k", "cuda")
def top_k(scores: Tensor, k: int, ends: Tensor | None, by_value: bool, nan: str) -> tuple[Tensor, Tensor]:
    n, width = scores.shape
    if not covered(scores) or not 0 < k <= LARGEST_K or nan not in ("ignore", "raise"):
        return NotImplemented
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    if nan == "raise":
        counts = scores.isnan()
        if ends is not None:
            counts &= torch.arange(width, device=scores.device) < ends.unsqueeze(1)
        if counts.any():
            return NotImplemented  # the reference says so
    if not width:
        return scores.new_full((n, k), float("-inf")), torch.full((n, k), -1, dtype=torch.int32, device=scores.device)
    chosen = select_top_k(scores, k, None, None if ends is None else ends.contiguous())
    values = torch.empty(n, k, dtype=scores.dtype, device=scores.device)
    positions = torch.empty_like(chosen) if by_value else chosen
    if n:
        _values[(n,)](
            scores, chosen, values, positions, scores.stride(0), k,
            BY_VALUE=by_value, PADDED=triton.next_power_of_2(k), num_warps=min(max(k // 256, 1), 8),
        )  # fmt: skip
    return values, positions
