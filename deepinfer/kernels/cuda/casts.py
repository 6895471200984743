"""Casts of rows, or of blocks of rows, to FP8 or FP4 with a scale for each group, and the inverse."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.cache_rows import has_pairs
from deepinfer.kernels.cuda.common import covered, rows_of
from deepinfer.kernels.cuda.formats import (
    FP8,
    MXFP4,
    NVFP4,
    e2m1_codes,
    e2m1_pairs_over,
    e2m1_value,
    e4m3_byte,
    e4m3_value,
    e8m0_value,
    over_power,
    pair_scale,
    scale_for,
)
from deepinfer.kernels.reference import casts  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend
from deepinfer.kernels.tile_kernels import casts as tile_casts

TILE = 2048  # values of a program
LARGEST_BLOCK = 16384  # values that a program holds to find their scale
SCALES = {"float32": 0, "ue8m0": 1, "e4m3": 2}  # SCALE of the kernels
FLOAT32, UE8M0 = (tl.constexpr(SCALES[kind]) for kind in ("float32", "ue8m0"))


@triton.jit
def _scale(largest, is_nan, FP4: tl.constexpr, SCALE: tl.constexpr):
    """What is stored for groups whose largest size is `largest` (inf where `is_nan`), and the scales float32."""
    MOST: tl.constexpr = 6.0 if FP4 else 448.0
    if SCALE == FLOAT32:
        scale = tl.div_rn(tl.maximum(largest, 1e-4), tl.full(largest.shape, MOST, tl.float32))
        scale = tl.where(largest == float("inf"), float("nan"), scale)
        stored = scale
    elif SCALE == UE8M0:
        stored, scale = scale_for(largest, is_nan, MXFP4 if FP4 else FP8)
    elif FP4:
        stored, scale = scale_for(largest, is_nan, NVFP4)
    else:
        least = MOST * 0.001953125
        stored = e4m3_byte(tl.div_rn(tl.maximum(largest, least), tl.full(largest.shape, MOST, tl.float32)))
        stored = tl.where(is_nan, 0x7F, stored.to(tl.int32))
        scale = tl.where(is_nan, float("nan"), e4m3_value(stored.to(tl.uint8)))
    return stored, scale


@triton.jit
def _sizes(x):
    """Bits of the sizes of x float32, int32: ordered as they are, infinity and then NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of_bits(bits, FP4: tl.constexpr, SCALE: tl.constexpr):
    """`_scale` of groups whose largest size has these bits."""
    largest = tl.minimum(bits, 0x7F800000).to(tl.float32, bitcast=True)
    return _scale(largest, bits > 0x7F800000, FP4, SCALE)


@triton.jit
def _store_codes(
    codes, x, scale, inside, FP4: tl.constexpr, SCALE: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr
):
    """Codes of x [LINES, COLUMNS] over `scale`, which broadcasts to it, at pointers `codes` (of FP4: a pair each)."""
    if FP4 and SCALE != FLOAT32:
        code = e2m1_codes(x, scale)
    else:
        ratio = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
        ratio = tl.where(ratio != ratio, 0.0, ratio)
        code = e2m1_codes(ratio, 1.0) if FP4 else e4m3_byte(ratio)
    if FP4:
        low, high = tl.split(tl.reshape(code, (LINES, COLUMNS // 2, 2)))
        tl.store(codes, (low | (high << 4)).to(tl.uint8), mask=inside)
    else:
        tl.store(codes, code, mask=inside)


@triton.jit
def _cast_rows(
    x, codes, scales, stride, groups, lines, group,
    FP4: tl.constexpr, SCALE: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A line is a group of a row. x may be BF16 pairs in words of int32 (FP4 with scales that BF16 holds)."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    alive = line < lines
    row = (line // groups).to(tl.int64)
    source = x + row * stride + (line % groups) * (group // 2 if x.dtype.element_ty == tl.int32 else group)
    pair = tl.arange(0, COLUMNS // 2)[None, :]
    in_pairs = alive[:, None] & (pair < group // 2)
    target = codes + line.to(tl.int64)[:, None] * (group // 2) + pair
    if x.dtype.element_ty == tl.int32:
        pairs = tl.load(source[:, None] + pair, mask=in_pairs, other=0)
        byte, scale = pair_scale(pairs, MXFP4 if SCALE == UE8M0 else NVFP4)
        tl.store(scales + line, byte.to(tl.uint8), mask=alive)
        tl.store(target, e2m1_pairs_over(pairs, scale), mask=in_pairs)
    else:
        at = tl.arange(0, COLUMNS)[None, :]
        inside = alive[:, None] & (at < group)
        value = tl.load(source[:, None] + at, mask=inside, other=0.0).to(tl.float32)
        stored, scale = _scale_of_bits(tl.max(_sizes(value), axis=1), FP4, SCALE)
        tl.store(scales + line, stored.to(scales.dtype.element_ty), mask=alive)
        if FP4:
            _store_codes(target, value, scale[:, None], in_pairs, FP4, SCALE, LINES, COLUMNS)
        elif SCALE == UE8M0:
            target = codes + line.to(tl.int64)[:, None] * group + at
            tl.store(target, e4m3_byte(over_power(value, stored)), mask=inside)
        else:
            target = codes + line.to(tl.int64)[:, None] * group + at
            _store_codes(target, value, scale[:, None], inside, FP4, SCALE, LINES, COLUMNS)


@triton.jit
def _block_tile(x, stride, first, most, n, dim, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Float32 numbers of up to `most` rows from `first` on and WIDTH columns; rows, columns, and which rows count."""
    at = tl.arange(0, ROWS)
    row = (first + at).to(tl.int64)[:, None]
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    alive = (row < n) & (at < most)[:, None]
    value = tl.load(x + row * stride + column, mask=alive & (column < dim), other=0.0).to(tl.float32)
    return value, row, column, alive


@triton.jit
def _largest_of_blocks(
    x, bits, stride, n, dim, height, ROWS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr
):
    """bits[block, group] = those of the largest size in a part of the block, if they are more."""
    first = tl.program_id(0) * ROWS
    value, _, _, _ = _block_tile(x, stride, first, ROWS, n, dim, ROWS, GROUPS * COLUMNS)
    largest = tl.max(tl.reshape(tl.max(_sizes(value), axis=0), (GROUPS, COLUMNS)), axis=1)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    tl.atomic_max(bits + first // height * (dim // COLUMNS) + group, largest, mask=group < dim // COLUMNS)


@triton.jit
def _cast_blocks(
    x, bits, codes, scales, stride, n, dim, height,
    FP4: tl.constexpr, SCALE: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """GROUPS groups of COLUMNS columns of a block (WHOLE), or of ROWS of its rows: `bits` has their largest sizes."""
    WIDTH: tl.constexpr = GROUPS * COLUMNS
    if WHOLE:
        first = tl.program_id(0) * height
        value, row, column, alive = _block_tile(x, stride, first, height, n, dim, ROWS, WIDTH)
    else:
        first = tl.program_id(0) * ROWS
        value, row, column, alive = _block_tile(x, stride, first, ROWS, n, dim, ROWS, WIDTH)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    of_group = first // height * (dim // COLUMNS) + group
    if WHOLE:
        largest = tl.max(tl.reshape(tl.max(_sizes(value), axis=0), (GROUPS, COLUMNS)), axis=1)
    else:
        largest = tl.load(bits + of_group, mask=group < dim // COLUMNS, other=0)
    stored, scale = _scale_of_bits(largest, FP4, SCALE)
    if first % height == 0:
        tl.store(scales + of_group, stored.to(scales.dtype.element_ty), mask=group < dim // COLUMNS)
    wide = tl.reshape(tl.broadcast_to(scale[:, None], (GROUPS, COLUMNS)), (1, WIDTH))
    if FP4:
        pair = tl.program_id(1) * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
        inside = alive & (pair < dim // 2)
        _store_codes(codes + row * (dim // 2) + pair, value, wide, inside, FP4, SCALE, ROWS, WIDTH)
    else:
        inside = alive & (column < dim)
        _store_codes(codes + row * dim + column, value, wide, inside, FP4, SCALE, ROWS, WIDTH)


@backend("cast_groups", "cuda")
def cast_groups(x: Tensor, values: str, scales: str, group_rows: int, group_columns: int) -> tuple[Tensor, Tensor]:
    fp4, (n, dim) = values == "e2m1", x.shape
    if not covered(x) or dim % group_columns or (fp4 and dim % 2):
        return NotImplemented
    if not fp4 and scales != "e4m3":
        fast = tile_casts.cast(x, scales == "ue8m0", group_rows, group_columns)
        if fast is not None:
            return fast
    x, stride = rows_of(x)
    codes = torch.empty(n, dim // 2 if fp4 else dim, dtype=torch.uint8, device=x.device)
    kind = torch.float32 if scales == "float32" else torch.uint8
    stored = torch.empty(triton.cdiv(n, group_rows), dim // group_columns, dtype=kind, device=x.device)
    if not n or not dim:
        return codes, stored
    columns = triton.next_power_of_2(group_columns)
    if group_rows == 1:
        if fp4 and group_columns % 2:
            return NotImplemented
        if fp4 and scales != "float32" and columns == group_columns and 16 <= columns <= TILE and has_pairs(x):
            x, stride = x.view(torch.int32), stride // 2
        lines, at_once = stored.numel(), max(TILE // columns, 1)
        _cast_rows[(triton.cdiv(lines, at_once),)](
            x, codes, stored, stride, dim // group_columns, lines, group_columns,
            FP4=fp4, SCALE=SCALES[scales], LINES=at_once, COLUMNS=columns, num_warps=min(max(columns // 1024, 4), 16),
        )  # fmt: skip
        return codes, stored
    if columns != group_columns or columns > 1024:
        return NotImplemented
    groups = max(64 // columns, 1)
    rows = triton.next_power_of_2(group_rows)
    whole = rows * groups * columns <= LARGEST_BLOCK
    bits = stored
    if not whole:
        rows = min(group_rows & -group_rows, 32) if group_rows < n else 32
        bits = torch.zeros(stored.shape, dtype=torch.int32, device=x.device)
    grid = (triton.cdiv(n, group_rows if whole else rows), triton.cdiv(dim, groups * columns))
    tile = {"ROWS": rows, "GROUPS": groups, "COLUMNS": columns}
    if not whole:
        _largest_of_blocks[grid](x, bits, stride, n, dim, group_rows, **tile)
    _cast_blocks[grid](
        x, bits, codes, stored, stride, n, dim, group_rows,
        FP4=fp4, SCALE=SCALES[scales], WHOLE=whole, num_warps=8 if rows * groups * columns > 4096 else 4, **tile,
    )  # fmt: skip
    return codes, stored


@triton.jit
def _uncast(
    codes, stored, out, dim, height, groups, group: tl.constexpr,
    FP4: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Part of a row; its block of rows has `groups` scales."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < dim
    scale = tl.load(stored + row // height * groups + column // group, mask=inside, other=0)
    if SCALE == UE8M0:
        scale = e8m0_value(scale.to(tl.int32))
    elif SCALE != FLOAT32:
        scale = e4m3_value(scale)
    if FP4:
        pair = tl.load(codes + row * (dim // 2) + column // 2, mask=inside, other=0).to(tl.int32)
        value = e2m1_value(tl.where(column % 2 == 0, pair, pair >> 4))
    else:
        value = e4m3_value(tl.load(codes + row * dim + column, mask=inside, other=0))
    tl.store(out + row * dim + column, (value * scale).to(out.dtype.element_ty), mask=inside)


@backend("uncast_groups", "cuda")
def uncast_groups(
    codes: Tensor, stored: Tensor, values: str, scales: str, group_rows: int, group_columns: int, dtype: torch.dtype
) -> Tensor:
    if dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    fp4, (n, width) = values == "e2m1", codes.shape
    out = torch.empty(n, 2 * width if fp4 else width, dtype=dtype, device=codes.device)
    if out.numel():
        dim = out.shape[1]
        block = min(triton.next_power_of_2(dim), TILE)
        _uncast[(n, triton.cdiv(dim, block))](
            codes.contiguous(), stored.contiguous(), out, dim, group_rows, dim // group_columns, group_columns,
            FP4=fp4, SCALE=SCALES[scales], BLOCK=block, num_warps=min(max(block // 512, 1), 4),
        )  # fmt: skip
    return out
