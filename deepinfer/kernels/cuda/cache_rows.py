"""Store, load and round trip of cache rows: one program a row."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.common import covered
from deepinfer.kernels.cuda.formats import (
    FP8,
    INTERPRETED,
    KINDS,
    PLAIN,
    e2m1_code_over,
    e2m1_pairs_over,
    e2m1_value,
    e4m3_byte,
    e4m3_value,
    group_scale,
    load_cache_rows,
    over_power,
    pair_scale,
)
from deepinfer.kernels.reference import basic, cache_rows  # noqa: F401  (define the operations)
from deepinfer.kernels.reference.cache_rows import RowFormat
from deepinfer.kernels.registry import backend
from deepinfer.kernels.tile_kernels import gather_rows

GROUP = {RowFormat.FP8: 32, RowFormat.MXFP4: 32, RowFormat.NVFP4: 16}


def cache_kind(cache: Tensor, row_format: RowFormat) -> int | None:
    """KIND of the kernels for a cache; None if they cannot read it."""
    if cache.stride(-1) != 1 or cache.dtype not in (torch.uint8, torch.float32, torch.bfloat16):
        return None
    return KINDS[row_format] if cache.dtype == torch.uint8 else 0


def alignment(cache: Tensor) -> int:
    """Bytes that every row's start is a multiple of, up to the 16 of the widest load."""
    size = cache.element_size()
    return math.gcd(16, cache.data_ptr(), cache.stride(0) * size, cache.stride(1) * size)


@triton.jit
def _row_start(cache, slots, row, alive, page_size, page_stride, row_stride):
    """Pointers at the rows of slots[row], 32 bits for the divisions: 64 take ten times as long. A slot of -1 is 0."""
    slot = tl.maximum(tl.load(slots + row, mask=alive, other=0).to(tl.int32), 0)
    page = slot // page_size
    return cache + page.to(tl.int64) * page_stride + (slot - page * page_size).to(tl.int64) * row_stride


@triton.jit
def _store(
    cache, slots, values, values_stride, count, page_size, page_stride, row_stride, dim,
    KIND: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program; a line of the tile is a group of one of them. Values may be BF16 pairs in words of int32."""
    line = tl.arange(0, ROWS * GROUPS)
    row = tl.program_id(0) * ROWS + line // GROUPS
    group = line % GROUPS
    alive = (row < count) & (group * GROUP < dim)
    target = _row_start(cache, slots, row, alive, page_size, page_stride, row_stride)
    target = tl.multiple_of(target, ALIGN)
    source = values + row.to(tl.int64)[:, None] * values_stride
    pair = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    if values.dtype.element_ty == tl.int32:
        pairs = tl.load(source + pair, mask=alive[:, None], other=0)
        byte, scale = pair_scale(pairs, KIND)
        tl.store(target + dim // 2 + group, byte.to(tl.uint8), mask=alive)
        tl.store(target[:, None] + pair, e2m1_pairs_over(pairs, scale), mask=alive[:, None])
        return
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = alive[:, None] & (at < dim)
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == PLAIN:
        tl.store(target[:, None] + at, x.to(cache.dtype.element_ty), mask=inside)
    else:
        byte, scale = group_scale(x, KIND)
        first = dim if KIND == FP8 else dim // 2
        tl.store(target + first + group, byte.to(tl.uint8), mask=alive)
        if KIND == FP8:
            tl.store(target[:, None] + at, e4m3_byte(over_power(x, byte)), mask=inside)
        else:
            low, high = tl.split(tl.reshape(e2m1_code_over(x, scale), (ROWS * GROUPS, GROUP // 2, 2)))
            tl.store(target[:, None] + pair, (low | (high << 4)).to(tl.uint8), mask=alive[:, None])


@backend("store_rows", "cuda")
def store_rows(cache: Tensor, slots: Tensor, values: Tensor, row_format: RowFormat) -> None:
    kind, dim, group = cache_kind(cache, row_format), values.shape[-1], GROUP[row_format]
    if kind is None or not covered(values) or (kind and dim % group):
        return NotImplemented
    if values.stride(-1) != 1:
        values = values.contiguous()
    n, groups = values.shape[0], triton.next_power_of_2(triton.cdiv(dim, group))
    rows = rows_of_a_program(n, groups * group)
    warps = 2 if rows == 1 else 4
    if row_format is not RowFormat.FP8 and kind and has_pairs(values):
        values = values.view(torch.int32)
        if n >= 1024:  # instructions of a row that are not those of its values count
            rows, warps = 2 * rows, 2
    _store[(triton.cdiv(n, rows),)](
        cache, slots.contiguous(), values, values.stride(0), n, cache.shape[1], cache.stride(0), cache.stride(1), dim,
        KIND=kind, ALIGN=alignment(cache), ROWS=rows, GROUPS=groups, GROUP=group, num_warps=warps,
    )  # fmt: skip
    return None


def has_pairs(x: Tensor) -> bool:
    """Whether a kernel may read BF16 numbers two at a time, in words of 4 bytes."""
    even = x.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])
    return x.dtype is torch.bfloat16 and even and not INTERPRETED.value


def rows_of_a_program(n: int, width: int) -> int:
    """Several rows where there are many, about 16 values a thread of four warps."""
    return max(2048 // width, 1) if n >= 1024 else 1


@triton.jit
def _load(
    cache, slots, out, count, page_size, page_stride, row_stride, dim: tl.constexpr, KIND: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    alive = row < count
    source = tl.multiple_of(_row_start(cache, slots, row, alive, page_size, page_stride, row_stride), ALIGN)
    value = load_cache_rows(source, alive, dim, KIND, ROWS, DIM, out.dtype.element_ty)
    at = tl.arange(0, DIM)
    tl.store(out + row.to(tl.int64)[:, None] * dim + at[None, :], value, mask=alive[:, None] & (at < dim)[None, :])


@backend("load_rows", "cuda")
def load_rows(cache: Tensor, slots: Tensor, row_format: RowFormat, dim: int, dtype: torch.dtype) -> Tensor:
    kind = cache_kind(cache, row_format)
    if kind is None or dtype not in (torch.float32, torch.bfloat16) or (kind and dim % GROUP[row_format]):
        return NotImplemented
    if kind and row_format is RowFormat.FP8 and dim == gather_rows.DIM and dtype is torch.bfloat16:
        gathered = gather_rows.gather_rows(cache, slots.contiguous())
        if gathered is not None:
            return gathered
    out = torch.empty(*slots.shape, dim, dtype=dtype, device=cache.device)
    n, width = slots.numel(), max(triton.next_power_of_2(dim), 32)
    if not n:
        return out
    rows = rows_of_a_program(n, width)
    _load[(triton.cdiv(n, rows),)](
        cache, slots.contiguous(), out, n, cache.shape[1], cache.stride(0), cache.stride(1), dim,
        KIND=kind, ALIGN=alignment(cache), ROWS=rows, DIM=width, num_warps=2 if rows == 1 else 4,
    )  # fmt: skip
    return out


@triton.jit
def _round_trip(values, out, groups, KIND: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (group < groups)[:, None]
    x = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    byte, scale = group_scale(x, KIND)
    if KIND == FP8:
        ratio = e4m3_value(e4m3_byte(over_power(x, byte)))
    else:
        ratio = e2m1_value(e2m1_code_over(x, scale))
    tl.store(out + at, (ratio * scale[:, None]).to(out.dtype.element_ty), mask=inside)


@backend("round_fp8", "cuda")
def round_fp8(x: Tensor) -> Tensor:
    return _round_trip_groups(x, RowFormat.FP8) if covered(x) and x.shape[-1] % 32 == 0 else NotImplemented


def _round_trip_groups(values: Tensor, row_format: RowFormat) -> Tensor:
    group = GROUP[row_format]
    values = values.contiguous()
    out = torch.empty_like(values)
    groups = values.numel() // group
    _round_trip[(triton.cdiv(groups, 64),)](values, out, groups, KIND=KINDS[row_format], GROUPS=64, GROUP=group)
    return out


@backend("round_trip_rows", "cuda")
def round_trip_rows(values: Tensor, cache: Tensor, row_format: RowFormat) -> Tensor:
    if cache.dtype is not torch.uint8 or not covered(values) or values.shape[-1] % GROUP[row_format]:
        return NotImplemented  # a cast or two
    return _round_trip_groups(values, row_format)
