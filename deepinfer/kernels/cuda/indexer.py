"""Lightning indexer: scores against paged index keys, and the candidate level."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cuda.cache_rows import alignment, cache_kind
from deepinfer.kernels.cuda.common import covered
from deepinfer.kernels.cuda.formats import load_cache_rows
from deepinfer.kernels.cuda.top_k import LARGEST_K, select_top_k
from deepinfer.kernels.deep_gemm import indexer as deep_gemm
from deepinfer.kernels.deep_gemm.available import is_available
from deepinfer.kernels.reference import indexer  # noqa: F401  (defines the operations)
from deepinfer.kernels.reference.cache_rows import RowFormat
from deepinfer.kernels.registry import backend

KEYS = 128  # of one step


@triton.jit
def _scores(
    iq, weights, cache, tables, owner, visible, out, heads, entries, page_stride, row_stride, table_stride, width,
    dim: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    KEYS: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of STEPS times KEYS keys for one row."""
    DTYPE: tl.constexpr = iq.dtype.element_ty
    row = tl.program_id(1).to(tl.int64)
    seen = tl.minimum(tl.load(visible + row), width)
    begin = tl.program_id(0) * (KEYS * STEPS)
    table = tables + tl.load(owner + row).to(tl.int64) * table_stride
    head = tl.arange(0, HEADS)
    at = tl.arange(0, DIM)
    inside = (head < heads)[None, :] & (at < dim)[:, None] & (begin < seen)
    q = tl.load(iq + (row * heads + head[None, :]) * dim + at[:, None], mask=inside, other=0.0)
    weight = tl.load(weights + row * heads + head, mask=head < heads, other=0.0).to(tl.float32)
    for step in range(STEPS):
        position = begin + step * KEYS + tl.arange(0, KEYS)
        score = tl.full((KEYS,), float("-inf"), tl.float32)
        if begin + step * KEYS < seen:
            alive = position < seen
            page = tl.load(table + position // entries, mask=alive, other=0).to(tl.int64)
            base = cache + page * page_stride + (position % entries) * row_stride
            base = tl.multiple_of(base, ALIGN)
            keys = load_cache_rows(base, alive, dim, KIND, KEYS, DIM, DTYPE)
            dots = tl.dot(keys, q, input_precision=PRECISION)
            dots = tl.where(dots < 0, 0.0, dots)
            score = tl.where(alive, tl.sum(dots * weight[None, :], axis=1), float("-inf"))
        tl.store(out + row * width + position, score, mask=position < width)


@backend("index_scores", "cuda")
def index_scores(
    iq: Tensor, weights: Tensor, cache: Tensor, block_tables: Tensor, sequence_of_row: Tensor, visible: Tensor
) -> Tensor:
    """As wide as the block tables reach, so that no row's context has to be known to the host."""
    if is_available(iq.device):
        scores = deep_gemm.index_scores(iq, weights, cache, block_tables, sequence_of_row, visible)
        if scores is not NotImplemented:
            return scores
    n, heads, dim = iq.shape
    kind = cache_kind(cache, RowFormat.MXFP4)
    if not covered(iq, weights) or kind is None or (kind and dim % 32):
        return NotImplemented
    entries = cache.shape[1]
    width = block_tables.shape[1] * entries
    out = torch.empty(n, width, dtype=torch.float32, device=iq.device)
    steps = 4 if n * width >= 1 << 20 else 1  # one query for more keys, where there are programs enough
    _scores[(triton.cdiv(width, KEYS * steps), n)](
        iq.contiguous(), weights.contiguous(), cache, block_tables.contiguous(), sequence_of_row.contiguous(),
        visible.contiguous(), out, heads, entries, cache.stride(0), cache.stride(1), block_tables.shape[1], width,
        dim=dim, KIND=kind, ALIGN=alignment(cache), HEADS=max(triton.next_power_of_2(heads), 16),
        DIM=max(triton.next_power_of_2(dim), 32), KEYS=KEYS, STEPS=steps,
        PRECISION="ieee" if iq.dtype is torch.float32 else "tf32",
    )  # fmt: skip
    return out


@triton.jit
def _block_maxima(
    scores, visible, out, stride, width, blocks, size, BLOCKS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Largest score of every block; the newest block of a row counts as +inf."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inner = tl.arange(0, SIZE)
    at = block[:, None] * size + inner[None, :]
    inside = (inner < size)[None, :] & (at < width)
    largest = tl.max(tl.load(scores + row * stride + at, mask=inside, other=float("-inf")), axis=1)
    seen = tl.load(visible + row).to(tl.int32)
    largest = tl.where((seen > 0) & (block == (seen - 1) // size), float("inf"), largest)
    tl.store(out + row * blocks + block, largest, mask=block < blocks)


@triton.jit
def _keep_blocks(positions, kept, blocks, k, TILE: tl.constexpr):
    """kept[row, positions of the row] = 1, the rest 0."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, blocks, TILE):
        at = start + tl.arange(0, TILE)
        tl.store(kept + row * blocks + at, tl.zeros((TILE,), tl.uint8), mask=at < blocks)
    tl.debug_barrier()
    for start in range(0, k, TILE):
        at = start + tl.arange(0, TILE)
        block = tl.load(positions + row * k + at, mask=at < k, other=-1)
        tl.store(kept + row * blocks + block, tl.full((TILE,), 1, tl.uint8), mask=block >= 0)


@backend("candidate_blocks", "cuda")
def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, top_blocks: int) -> Tensor:
    n, width = scores.shape
    covers = scores.dtype is torch.float32 and scores.stride(1) == 1 and 0 < top_blocks <= LARGEST_K
    if width == 0 or not covers:
        return NotImplemented
    blocks = triton.cdiv(width, block_size)
    maxima = torch.empty(n, blocks, dtype=torch.float32, device=scores.device)
    kept = torch.empty(n, blocks, dtype=torch.bool, device=scores.device)
    size = triton.next_power_of_2(block_size)
    at_once = max(2048 // size, 1)
    _block_maxima[(n, triton.cdiv(blocks, at_once))](
        scores, visible.contiguous(), maxima, scores.stride(0), width, blocks, block_size, BLOCKS=at_once, SIZE=size
    )
    positions = select_top_k(maxima, top_blocks)
    _keep_blocks[(n,)](positions, kept.view(torch.uint8), blocks, top_blocks, TILE=2048, num_warps=8)
    return kept


@triton.jit
def _mask(scores, kept, out, stride, width, blocks, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row * stride + at, mask=at < width, other=0.0)
    inside = tl.load(kept + row * blocks + at // size, mask=at < width, other=0)
    tl.store(out + row * width + at, tl.where(inside != 0, score, float("-inf")), mask=at < width)


@backend("mask_to_candidates", "cuda")
def mask_to_candidates(scores: Tensor, kept: Tensor, block_size: int) -> Tensor:
    n, width = scores.shape
    if not covered(scores) or scores.stride(1) != 1:
        return NotImplemented
    out = torch.empty(n, width, dtype=scores.dtype, device=scores.device)
    kept = kept.contiguous().view(torch.uint8)
    _mask[(n, triton.cdiv(width, 2048))](
        scores, kept, out, scores.stride(0), width, kept.shape[1], block_size, BLOCK=2048
    )
    return out
