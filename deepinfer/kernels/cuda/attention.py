"""Sparse attention over packed rows: flash-decoding with a split over the keys and a deterministic combine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.cache_rows import alignment, cache_kind
from deepinfer.kernels.cuda.common import covered
from deepinfer.kernels.cuda.formats import load_cache_rows
from deepinfer.kernels.flash_mla import attention as hopper
from deepinfer.kernels.reference import attention  # noqa: F401  (defines the operation)
from deepinfer.kernels.reference.cache_rows import RowFormat, latent_format
from deepinfer.kernels.registry import backend

KEYS = 32  # of one step
PROGRAMS = 264  # two a multiprocessor: as many splits as fill them


@triton.jit
def _step(
    q, best, total, result, slots, first, count, cache, page_size, page_stride, row_stride, scale,
    dim: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over KEYS more keys."""
    at = first + tl.arange(0, KEYS)
    slot = tl.load(slots + at, mask=at < count, other=-1)
    alive = slot >= 0
    base = cache + (slot // page_size).to(tl.int64) * page_stride + (slot % page_size).to(tl.int64) * row_stride
    base = tl.multiple_of(tl.where(alive, base, cache), ALIGN)
    keys = load_cache_rows(base, alive, dim, KIND, KEYS, DIM, q.dtype)
    logits = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
    logits = tl.where(alive[None, :], logits, float("-inf"))
    new_best = tl.maximum(best, tl.max(logits, axis=1))
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    p = tl.exp(logits - shift[:, None])
    fade = tl.exp(best - shift)
    total = total * fade + tl.sum(p, axis=1)
    result = tl.dot(p.to(keys.dtype), keys, result * fade[:, None], input_precision=PRECISION)
    return new_best, total, result


@triton.jit
def _attend(
    q, window, window_slots, latent, latent_slots, sink, out, part_out, part_best, part_total,
    n, heads, num_window, num_latent, window_page, window_page_stride, window_row_stride, latent_page,
    latent_page_stride, latent_row_stride, scale, tiles_a_split,
    dim: tl.constexpr, WINDOW: tl.constexpr, WINDOW_ALIGN: tl.constexpr, LATENT: tl.constexpr,
    LATENT_ALIGN: tl.constexpr, HAS_LATENT: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(2)
    at = tl.arange(0, DIM)
    inside = (head < heads)[:, None] & (at < dim)[None, :]
    place = (row * heads + head[:, None]) * dim + at[None, :]
    query = tl.load(q + place, mask=inside, other=0.0)
    best = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    result = tl.zeros((HEADS, DIM), tl.float32)
    window_tiles = tl.cdiv(num_window, KEYS)
    begin, end = split * tiles_a_split, (split + 1) * tiles_a_split
    for tile in range(begin, tl.minimum(end, window_tiles)):
        best, total, result = _step(
            query, best, total, result, window_slots + row * num_window, tile * KEYS, num_window, window, window_page,
            window_page_stride, window_row_stride, scale, dim, WINDOW, WINDOW_ALIGN, KEYS, DIM, PRECISION,
        )  # fmt: skip
    if HAS_LATENT:
        latent_end = tl.minimum(end - window_tiles, tl.cdiv(num_latent, KEYS))
        for tile in range(tl.maximum(begin - window_tiles, 0), latent_end):
            best, total, result = _step(
                query, best, total, result, latent_slots + row * num_latent, tile * KEYS, num_latent, latent,
                latent_page, latent_page_stride, latent_row_stride, scale, dim, LATENT, LATENT_ALIGN, KEYS, DIM,
                PRECISION,
            )  # fmt: skip
    if SPLITS == 1:
        sinks = tl.load(sink + head, mask=head < heads, other=0.0).to(tl.float32)
        largest = tl.maximum(best, sinks)
        fade = tl.exp(best - largest)
        result = result * (fade / (total * fade + tl.exp(sinks - largest)))[:, None]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    else:
        part = (split * n + row) * heads + head
        tl.store(part_best + part, best, mask=head < heads)
        tl.store(part_total + part, total, mask=head < heads)
        tl.store(part_out + part[:, None] * dim + at[None, :], result, mask=inside)


@triton.jit
def _combine(
    part_out, part_best, part_total, sink, out, n, heads, dim, SPLITS: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """Weighs the splits' results against each other, in the order of the splits."""
    item = tl.program_id(0).to(tl.int64)  # row * heads + head
    at = tl.arange(0, DIM)
    sinks = tl.load(sink + item % heads).to(tl.float32)
    largest = sinks
    for split in range(SPLITS):
        largest = tl.maximum(largest, tl.load(part_best + split * n * heads + item))
    total = tl.exp(sinks - largest)
    result = tl.zeros((DIM,), tl.float32)
    for split in range(SPLITS):
        part = split * n * heads + item
        weight = tl.exp(tl.load(part_best + part) - largest)
        total += weight * tl.load(part_total + part)
        result += weight * tl.load(part_out + part * dim + at, mask=at < dim, other=0.0)
    tl.store(out + item * dim + at, (result / total).to(out.dtype.element_ty), mask=at < dim)


@backend("sparse_attention", "cuda")
def sparse_attention(
    q: Tensor,
    window_cache: Tensor,
    window_slots: Tensor,
    latent_cache: Tensor | None,
    latent_slots: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    result = hopper.sparse_attention(q, window_cache, window_slots, latent_cache, latent_slots, sink, scale)
    if result is not NotImplemented:
        return result
    n, heads, dim = q.shape
    window_kind = cache_kind(window_cache, RowFormat.FP8)
    has_latent = latent_cache is not None and latent_slots is not None
    if latent_cache is None or latent_slots is None:
        latent_cache, latent_slots, latent_kind = window_cache, window_slots[:, :0], window_kind
    else:
        latent_kind = cache_kind(latent_cache, latent_format(latent_cache, dim))
    if (
        not covered(q, sink)
        or window_kind is None
        or latent_kind is None
        or (dim % 32 and (window_kind or latent_kind))
    ):
        return NotImplemented
    q, window_slots, latent_slots = q.contiguous(), window_slots.contiguous(), latent_slots.contiguous()
    wide = q.dtype is torch.float32
    head_block = 16 if wide else min(max(triton.next_power_of_2(heads), 16), 64)
    head_blocks = triton.cdiv(heads, head_block)
    tiles = triton.cdiv(window_slots.shape[1], KEYS) + triton.cdiv(latent_slots.shape[1], KEYS)
    splits = max(min(PROGRAMS // max(n * head_blocks, 1), tiles), 1)
    tiles_a_split = triton.cdiv(tiles, splits)
    splits = max(triton.cdiv(tiles, tiles_a_split), 1)

    def new(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=q.device)

    out = torch.empty_like(q)
    parts = (out, out, out)
    if splits > 1:
        parts = (new(splits, n, heads, dim), new(splits, n, heads), new(splits, n, heads))
    padded = max(triton.next_power_of_2(dim), 32)
    _attend[(n, head_blocks, splits)](
        q, window_cache, window_slots, latent_cache, latent_slots, sink, out, *parts, n, heads,
        window_slots.shape[1], latent_slots.shape[1],
        window_cache.shape[1], window_cache.stride(0), window_cache.stride(1),
        latent_cache.shape[1], latent_cache.stride(0), latent_cache.stride(1), scale, tiles_a_split,
        dim=dim, WINDOW_ALIGN=alignment(window_cache), LATENT_ALIGN=alignment(latent_cache),
        WINDOW=window_kind, LATENT=latent_kind, HAS_LATENT=has_latent, SPLITS=splits, HEADS=head_block, DIM=padded,
        KEYS=KEYS, PRECISION="ieee" if wide else "tf32",
        num_warps=8 if padded * head_block >= 16384 else 4, num_stages=1 if wide else 2,
    )  # fmt: skip
    if splits > 1:
        _combine[(n * heads,)](*parts, sink, out, n, heads, dim, SPLITS=splits, DIM=padded, num_warps=2)
    return out


backend("rotated_attention", "cuda")(hopper.rotated_attention)
