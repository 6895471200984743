"""The operation `index_scores` over the engine's MXFP4 cache by the kernels of mqa_logits.cu."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm.mqa_logits import (
    DIM,
    FP4_PAGES,
    FP4_ROW,
    HEADS,
    MAX_SEQUENCES,
    mqa_logits,
    paged_mqa_logits,
)
from deepinfer.kernels.deep_jit import Build, Kernel

SOURCE = Path(__file__).parent / "mqa_queries.cu"
MAX_KEYS = 1 << 22  # of all sequences together that are widened for a prefill step: 132 bytes each
FEWEST_SCORES = 1 << 18  # a smaller step is left to one launch of Triton's kernel
NARROWEST = 4096  # keys of a prefill step's tables; in narrower ones Triton's kernel is as fast


def builds() -> list[Build]:
    """Queries in both orders, and keys."""
    return [_build("mqa_queries", True), _build("mqa_queries", False), _build("mqa_keys", False)]


def _build(name: str, fp4_order: bool) -> Build:
    return Build(name, SOURCE, {"FP4_ORDER": int(fp4_order), "HEADS": HEADS})


@cache
def _kernel(name: str, fp4_order: bool = False) -> Kernel:
    return Kernel(_build(name, fp4_order))


def index_scores(
    iq: Tensor, weights: Tensor, cache: Tensor, block_tables: Tensor, sequence_of_row: Tensor, visible: Tensor
) -> Any:
    """`index_scores` of kernels/reference/indexer.py, as wide as the block tables reach.

    Covers 32 heads of 128 in BF16 whose values an FP4 round trip left (E4M3 then holds them exactly), and pages of 64
    or 128 MXFP4 keys: one row a sequence (decode), or more (prefill). NotImplemented for other cases.
    """
    rows, heads, dim = iq.shape
    entries, sequences = cache.shape[1], block_tables.shape[0]
    width = block_tables.shape[1] * entries
    if iq.dtype != torch.bfloat16 or heads != HEADS or dim != DIM or not rows or visible.dtype != torch.int32:
        return NotImplemented
    if cache.dtype != torch.uint8 or cache.shape[2] != FP4_ROW or entries not in FP4_PAGES or not width:
        return NotImplemented
    if cache.stride(1) != FP4_ROW or cache.stride(2) != 1 or cache.stride(0) % 16 or cache.data_ptr() % 16:
        return NotImplemented
    if weights.dtype not in (torch.bfloat16, torch.float32) or block_tables.stride(1) != 1:
        return NotImplemented
    if rows * width < FEWEST_SCORES or (rows != sequences and width < NARROWEST):
        return NotImplemented
    if rows == sequences and rows <= MAX_SEQUENCES:  # every sequence has one row: the rows are in their order
        queries, folded = _queries(iq, weights, fp4_order=True)
        visible, queries = visible.contiguous(), queries.unsqueeze(1)
        return paged_mqa_logits(queries, cache, folded, visible, block_tables, width, clean=True, ordered=True)
    if sequences * width > MAX_KEYS:
        return NotImplemented
    queries, folded = _queries(iq, weights, fp4_order=False)
    owner = sequence_of_row.long()
    most = torch.zeros(sequences, dtype=torch.int32, device=iq.device).scatter_reduce_(0, owner, visible, "amax")
    keys, scales = _keys(cache, block_tables, most, width)
    starts = (owner * width).int()
    return mqa_logits(queries, keys, scales, folded, starts, starts + visible, width=width)


def _queries(iq: Tensor, weights: Tensor, fp4_order: bool) -> tuple[Tensor, Tensor]:
    """E4M3 [N, 32, 128], and the heads' weights times their scales, float32 [N, 32]."""
    iq, weights = iq.contiguous(), weights.contiguous()
    queries = torch.empty(iq.shape, dtype=torch.float8_e4m3fn, device=iq.device)
    folded = torch.empty(weights.shape, device=iq.device)
    source, source_weights, target, target_weights = (
        ctypes.c_void_p(t.data_ptr()) for t in (iq, weights, queries, folded)
    )
    is_bf16 = ctypes.c_int(weights.dtype is torch.bfloat16)
    grid, block = (iq.shape[0], 1, 1), (HEADS * 8, 1, 1)
    kernel = _kernel("mqa_queries", fp4_order)
    kernel.launch(grid, block, source, source_weights, is_bf16, target, target_weights)
    return queries, folded


def _keys(cache: Tensor, block_tables: Tensor, most: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Keys of all sequences E4M3 [S * width, 128] and their scales [S * width]; unwritten from most[s] on."""
    sequences = block_tables.shape[0]
    keys = torch.empty(sequences * width, DIM, dtype=torch.float8_e4m3fn, device=cache.device)
    scales = torch.empty(sequences * width, device=cache.device)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (cache, block_tables, most, keys, scales)]
    numbers = [ctypes.c_int(n) for n in (sequences, width, cache.shape[1], block_tables.stride(0))]
    grid = (-(-width // 32), sequences, 1)
    _kernel("mqa_keys").launch(grid, (256, 1, 1), *pointers, *numbers, ctypes.c_int64(cache.stride(0)))
    return keys, scales
