"""Token masks on a GPU: one pass over the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference import bitmask as reference  # noqa: F401  (defines the operation)
from deepinfer.kernels.registry import backend

BLOCK = 2048


@triton.jit
def _apply(logits, stride, bitmask, mask_stride, out, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    word = tl.load(bitmask + row * mask_stride + at // 32, mask=inside, other=0)
    value = tl.load(logits + row * stride + at, mask=inside)
    tl.store(out + row * vocab + at, tl.where((word >> (at % 32)) & 1 != 0, value, float("-inf")), mask=inside)


@backend("apply_token_bitmask", "cuda")
def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    if logits.dtype is not torch.float32 or logits.stride(1) != 1 or bitmask.stride(1) != 1:
        return NotImplemented
    n, vocab = logits.shape
    out = torch.empty(n, vocab, dtype=torch.float32, device=logits.device)
    if n:
        grid = (n, triton.cdiv(vocab, BLOCK))
        _apply[grid](logits, logits.stride(0), bitmask, bitmask.stride(0), out, vocab, BLOCK=BLOCK, num_warps=8)
    return out
