"""The operation `index_scores` over the engine's MXFP4 cache by the kernel of mqa_logits.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm.activations import quantize_rows
from deepinfer.kernels.deep_gemm.mqa_logits import DIM, FP4_PAGES, FP4_ROW, MAX_SEQUENCES, paged_mqa_logits


def index_scores(
    iq: Tensor, weights: Tensor, cache: Tensor, block_tables: Tensor, sequence_of_row: Tensor, visible: Tensor
) -> Any:
    """`index_scores` of kernels/reference/indexer.py, as wide as the block tables reach.

    Covers up to 1,024 rows of 32 heads of 128 in BF16 whose values an FP4 round trip left (E4M3 then holds them
    exactly), and pages of 64 or 128 MXFP4 keys; NotImplemented for other cases.
    """
    rows, heads, dim = iq.shape
    entries = cache.shape[1]
    if iq.dtype != torch.bfloat16 or heads != 32 or dim != DIM or not 0 < rows <= MAX_SEQUENCES:
        return NotImplemented
    if cache.dtype != torch.uint8 or cache.shape[2] != FP4_ROW or entries not in FP4_PAGES:
        return NotImplemented
    if cache.stride(1) != FP4_ROW or cache.stride(0) % 16 or cache.data_ptr() % 16 or visible.dtype != torch.int32:
        return NotImplemented
    values, scales = quantize_rows(iq.reshape(rows * heads, dim))
    folded = weights.float() * scales.view(rows, heads)
    tables = block_tables.index_select(0, sequence_of_row)
    width = tables.shape[1] * entries
    out = torch.full((rows, width), float("-inf"), device=iq.device)
    return paged_mqa_logits(values.view(rows, 1, heads, dim), cache, folded, visible, tables, width, out)
