"""Mixture of experts: the routed experts as two grouped matrix products.

Each (row, slot) pair of the gate's choice is a row of its expert's product. `_route` orders the pairs by expert, in
tiles of one expert each; the products compute W x^T, weights first, so that few pairs still fill the tensor cores'
rows. FP4 weights are widened on the way from memory to the tensor cores. A pair's result does not depend on its place,
and a row adds its pairs in the order of its slots: results are deterministic and do not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.basic import gated
from deepinfer.kernels.cuda.cache_rows import round_fp8
from deepinfer.kernels.cuda.common import covered
from deepinfer.kernels.cuda.formats import (
    FP8,
    INTERPRETED,
    e4m3_byte,
    e4m3_value,
    group_scale,
    load_packed,
    over_power,
    spread,
    widen,
)
from deepinfer.kernels.reference import moe  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend

TWO_63 = tl.constexpr(2.0**63)


@triton.jit
def _route(
    chosen, scratch, order, tiles, pairs, experts, max_tiles, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """order int32 [pairs]: the pairs by expert. tiles int32 [max_tiles, 3]: expert (-1: none), first and end in order.

    One program. scratch int32: [EXPERTS] counts, [EXPERTS] begins, [pairs] ranks.
    """
    expert = tl.arange(0, EXPERTS)
    begins, ranks = scratch + EXPERTS, scratch + 2 * EXPERTS
    tl.store(scratch + expert, tl.zeros((EXPERTS,), tl.int32))
    tl.debug_barrier()
    for start in range(0, pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        own = tl.load(chosen + at, mask=at < pairs, other=0)
        tl.store(ranks + at, tl.atomic_add(scratch + own, 1, mask=at < pairs), mask=at < pairs)
    tl.debug_barrier()
    count = tl.load(scratch + expert)
    begin = tl.cumsum(count, axis=0) - count
    tl.store(begins + expert, begin)
    num_tiles = (count + ROWS - 1) // ROWS
    tile_end = tl.cumsum(num_tiles, axis=0)
    tl.debug_barrier()
    for start in range(0, pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        own = tl.load(chosen + at, mask=at < pairs, other=0)
        place = tl.load(begins + own) + tl.load(ranks + at, mask=at < pairs, other=0)
        tl.store(order + place, at, mask=at < pairs)
    for step in range(tl.max(num_tiles, axis=0)):
        tile = tile_end - num_tiles + step
        first = begin + step * ROWS
        own = step < num_tiles
        tl.store(tiles + tile * 3, expert, mask=own)
        tl.store(tiles + tile * 3 + 1, first, mask=own)
        tl.store(tiles + tile * 3 + 2, tl.minimum(first + ROWS, begin + count), mask=own)
    for start in range(0, max_tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        tl.store(tiles + tile * 3, -1, mask=(tile >= tl.max(tile_end, axis=0)) & (tile < max_tiles))


@triton.jit
def _load_weights(
    w, scale, row, alive, start, dim: tl.constexpr, FP4: tl.constexpr, DEPTH: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """[rows, DEPTH] of a weight matrix with `dim` columns, rows int64, columns from start on; as stored."""
    if FP4 and DTYPE == tl.bfloat16 and not INTERPRETED:  # eight values a word
        word = start // 8 + tl.arange(0, DEPTH // 8)
        group = start // 32 + tl.arange(0, DEPTH // 32)
        source = w.to(tl.pointer_type(tl.int32)) + row[:, None] * (dim // 8) + word[None, :]
        if dim % DEPTH == 0:
            inside, inside_group = alive[:, None], alive[:, None]
        else:
            inside, inside_group = (
                alive[:, None] & (word < dim // 8)[None, :],
                alive[:, None] & (group < dim // 32)[None, :],
            )
        values = tl.load(source, mask=inside, other=0)
        scales = tl.load(scale + row[:, None] * (dim // 32) + group[None, :], mask=inside_group, other=0)
    elif FP4:
        values, scales = load_packed(w + row * (dim // 2), scale + row * (dim // 32), alive, start, dim, 32, DEPTH)
    else:
        at = start + tl.arange(0, DEPTH)
        inside = alive[:, None] & (at < dim)[None, :]
        values = tl.load(w + row[:, None] * dim + at[None, :], mask=inside, other=0.0)
        scales = values
    return values, scales


@triton.jit
def _widen_words(words, byte, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """BF16 [ROWS, DEPTH] of E2M1 words and E8M0 bytes, times 2^-63.

    A code's bits in those of a BF16 number are its value times 2^-126. The scale makes up for half of that only, so
    that it stays in the range of BF16 (for scales from 2^-60 to 2^64); TWO_63 makes up for the rest.
    """
    half = tl.where(byte < 192, (byte.to(tl.int32) + 63) << 7, 0x7FC0)
    scale = spread(half | (half << 16), ROWS, DEPTH // 32, 4)
    v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
        """{
        .reg .b32 byte, twice, bits, sign;
        bfe.u32 byte, $8, 0, 8;
        mul.lo.u32 twice, byte, 0x1001;
        shl.b32 bits, twice, 6;
        and.b32 bits, bits, 0x01C001C0;
        shl.b32 sign, twice, 12;
        and.b32 sign, sign, 0x80008000;
        or.b32 bits, bits, sign;
        mul.bf16x2 bits, bits, $9;
        mov.b32 {$0, $1}, bits;
        bfe.u32 byte, $8, 8, 8;
        mul.lo.u32 twice, byte, 0x1001;
        shl.b32 bits, twice, 6;
        and.b32 bits, bits, 0x01C001C0;
        shl.b32 sign, twice, 12;
        and.b32 sign, sign, 0x80008000;
        or.b32 bits, bits, sign;
        mul.bf16x2 bits, bits, $9;
        mov.b32 {$2, $3}, bits;
        bfe.u32 byte, $8, 16, 8;
        mul.lo.u32 twice, byte, 0x1001;
        shl.b32 bits, twice, 6;
        and.b32 bits, bits, 0x01C001C0;
        shl.b32 sign, twice, 12;
        and.b32 sign, sign, 0x80008000;
        or.b32 bits, bits, sign;
        mul.bf16x2 bits, bits, $9;
        mov.b32 {$4, $5}, bits;
        bfe.u32 byte, $8, 24, 8;
        mul.lo.u32 twice, byte, 0x1001;
        shl.b32 bits, twice, 6;
        and.b32 bits, bits, 0x01C001C0;
        shl.b32 sign, twice, 12;
        and.b32 sign, sign, 0x80008000;
        or.b32 bits, bits, sign;
        mul.bf16x2 bits, bits, $9;
        mov.b32 {$6, $7}, bits;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=1,
    )  # fmt: skip
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.reshape(tl.join(even, odd), (ROWS, DEPTH))


@triton.jit
def _load_rows(x, row, alive, start, dim: tl.constexpr, DEPTH: tl.constexpr):
    """[DEPTH, rows] of activations at pointers x + row, transposed."""
    at = start + tl.arange(0, DEPTH)
    return tl.load(x + row[None, :] + at[:, None], mask=alive[None, :] & (at < dim)[:, None], other=0.0)


@triton.jit
def _add_product(
    total, values, scales, x, FP4: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    if FP4 and x.dtype == tl.bfloat16 and not INTERPRETED:
        values = _widen_words(values, scales, COLUMNS, DEPTH)
    elif FP4:
        values = widen(values, scales, 32, COLUMNS, DEPTH, x.dtype)
    return tl.dot(values, x, total, input_precision=PRECISION)


@triton.jit
def _gate_up(
    x, w, scale, gates, order, tiles, z, x_stride, slots, limit,
    dim: tl.constexpr, inner: tl.constexpr,
    FP4: tl.constexpr, QUANTIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """z [pairs in order, inner] = gate * SwiGLU of the pair's row with its expert's w1 and w3."""
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    if expert >= 0:
        DTYPE: tl.constexpr = x.dtype.element_ty
        place = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS)
        alive = place < tl.load(tiles + tile * 3 + 2)
        pair = tl.load(order + place, mask=alive, other=0)
        row = (pair // slots).to(tl.int64)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < inner
        g = tl.zeros((COLUMNS, ROWS), tl.float32)
        u = tl.zeros((COLUMNS, ROWS), tl.float32)
        first = expert * 2 * inner + column
        row = row * x_stride
        # What the next step multiplies is on its way while this one does.
        w1, scale1 = _load_weights(w, scale, first, inside, 0, dim, FP4, DEPTH, DTYPE)
        w3, scale3 = _load_weights(w, scale, first + inner, inside, 0, dim, FP4, DEPTH, DTYPE)
        value = _load_rows(x, row, alive, 0, dim, DEPTH)
        for start in range(DEPTH, dim + DEPTH, DEPTH):
            start = tl.multiple_of(start, DEPTH)
            ahead = inside & (start < dim)
            next_w1, next_scale1 = _load_weights(w, scale, first, ahead, start, dim, FP4, DEPTH, DTYPE)
            next_w3, next_scale3 = _load_weights(w, scale, first + inner, ahead, start, dim, FP4, DEPTH, DTYPE)
            next_value = _load_rows(x, row, alive, start, dim, DEPTH)
            g = _add_product(g, w1, scale1, value, FP4, COLUMNS, DEPTH, PRECISION)
            u = _add_product(u, w3, scale3, value, FP4, COLUMNS, DEPTH, PRECISION)
            w1, scale1, w3, scale3, value = next_w1, next_scale1, next_w3, next_scale3, next_value
        if FP4 and DTYPE == tl.bfloat16 and not INTERPRETED:
            g, u = g * TWO_63, u * TWO_63
        gate = tl.load(gates + pair, mask=alive, other=0.0)
        result = gate[None, :] * gated(g, u, limit)
        if QUANTIZE:  # of float32: a value that BF16 moves across a boundary of FP8 is off by a whole step of FP8
            groups = tl.reshape(result, (COLUMNS // 32, 32, ROWS))
            byte, group_scales = group_scale(groups, FP8)
            groups = e4m3_value(e4m3_byte(over_power(groups, byte))) * group_scales[:, None]
            result = tl.reshape(groups, (COLUMNS, ROWS))
        target = z + place[None, :].to(tl.int64) * inner + column[:, None]
        tl.store(target, result.to(DTYPE), mask=inside[:, None] & alive[None, :])


@triton.jit
def _down(
    z, w, scale, order, tiles, out, dim: tl.constexpr, inner: tl.constexpr,
    FP4: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [pairs, dim] = w2 of the pair's expert times z [pairs in order, inner]."""
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    if expert >= 0:
        DTYPE: tl.constexpr = z.dtype.element_ty
        place = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS)
        alive = place < tl.load(tiles + tile * 3 + 2)
        pair = tl.load(order + place, mask=alive, other=0).to(tl.int64)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < dim
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        row = place.to(tl.int64) * inner
        first = expert * dim + column
        w2, scale2 = _load_weights(w, scale, first, inside, 0, inner, FP4, DEPTH, DTYPE)
        value = _load_rows(z, row, alive, 0, inner, DEPTH)
        for start in range(DEPTH, inner + DEPTH, DEPTH):
            start = tl.multiple_of(start, DEPTH)
            ahead = inside & (start < inner)
            next_w2, next_scale2 = _load_weights(w, scale, first, ahead, start, inner, FP4, DEPTH, DTYPE)
            next_value = _load_rows(z, row, alive, start, inner, DEPTH)
            total = _add_product(total, w2, scale2, value, FP4, COLUMNS, DEPTH, PRECISION)
            w2, scale2, value = next_w2, next_scale2, next_value
        if FP4 and DTYPE == tl.bfloat16 and not INTERPRETED:
            total = total * TWO_63
        target = out + pair[None, :] * dim + column[:, None]
        tl.store(target, total.to(DTYPE), mask=inside[:, None] & alive[None, :])


@triton.jit
def _add_slots(parts, out, dim, slots, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(slots):
        total += tl.load(parts + (row * slots + slot) * dim + at, mask=at < dim, other=0.0).to(tl.float32)
    tl.store(out + row * dim + at, total, mask=at < dim)


@backend("moe_experts", "cuda")
def moe_experts(
    x: Tensor, chosen: Tensor, gates: Tensor, w13: Tensor, w2: Tensor, limit: float, quantize_activations: bool
) -> Tensor:
    if not covered(x, w13, w2) or not x.dtype == w13.dtype == w2.dtype:
        return NotImplemented
    return _experts(x, chosen, gates, (w13, None), (w2, None), w2.shape[2], limit, quantize_activations)


@backend("moe_experts_fp4", "cuda")
def moe_experts_fp4(
    x: Tensor,
    chosen: Tensor,
    gates: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    limit: float,
    quantize_activations: bool,
) -> Tensor:
    inner = 2 * w2.shape[2]
    if not covered(x) or x.shape[1] % 32 or inner % 32:
        return NotImplemented
    w13, w13_scale, w2, w2_scale = (t.view(torch.uint8) for t in (w13, w13_scale, w2, w2_scale))
    return _experts(x, chosen, gates, (w13, w13_scale), (w2, w2_scale), inner, limit, quantize_activations)


def _experts(x, chosen, gates, w13, w2, inner, limit, quantize_activations):
    """w13 and w2 are (values, scales); scales None: plain values of x's dtype."""
    n, dim = x.shape
    slots, experts = chosen.shape[1], w13[0].shape[0]
    weights = [t for t in (*w13, *w2) if t is not None]
    if gates.dtype is not torch.float32 or not all(t.is_contiguous() for t in weights):
        return NotImplemented
    if quantize_activations:
        if dim % 32 or inner % 32:
            return NotImplemented
        x = round_fp8(x)
    if x.stride(1) != 1:
        x = x.contiguous()
    pairs = n * slots
    rows = expert_rows(pairs, experts)
    max_tiles = min(pairs, experts) + pairs // rows
    padded = triton.next_power_of_2(experts)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=x.device)

    order, tiles = new(pairs), new(max_tiles, 3)
    out, parts, z = new(n, dim, dtype=torch.float32), new(pairs, dim, dtype=x.dtype), new(pairs, inner, dtype=x.dtype)
    if not n:
        return out
    _route[(1,)](
        chosen.contiguous(), new(2 * padded + pairs), order, tiles, pairs, experts, max_tiles,
        ROWS=rows, EXPERTS=padded, CHUNK=1024, num_warps=8,
    )  # fmt: skip
    fp4, wide = w13[1] is not None, x.dtype is torch.float32
    shape = {"FP4": fp4, "ROWS": rows, "PRECISION": "ieee" if wide else "tf32", **product_shape(rows, wide)}
    columns = shape["COLUMNS"]
    _gate_up[(triton.cdiv(inner, columns), max_tiles)](
        x, *w13, gates.contiguous(), order, tiles, z, x.stride(0), slots, limit, dim, inner,
        QUANTIZE=quantize_activations, **shape,
    )  # fmt: skip
    _down[(triton.cdiv(dim, columns), max_tiles)](z, *w2, order, tiles, parts, dim, inner, **shape)
    block = min(triton.next_power_of_2(dim), 1024)
    _add_slots[(n, triton.cdiv(dim, block))](parts, out, dim, slots, BLOCK=block)
    return out


def expert_rows(pairs: int, experts: int) -> int:
    """Pairs of one tile: about what an expert has, so that few tiles are padding."""
    return min(max(triton.next_power_of_2(triton.cdiv(pairs, experts)), 16), 64)


def product_shape(rows: int, wide: bool) -> dict[str, int]:
    """Tile of a product: weight rows, columns of one step, warps and stages of the pipeline."""
    if wide:
        return {"COLUMNS": 32, "DEPTH": 32, "num_warps": 4, "num_stages": 1}
    return {"COLUMNS": 64, "DEPTH": 128, "num_warps": 4, "num_stages": 1}
