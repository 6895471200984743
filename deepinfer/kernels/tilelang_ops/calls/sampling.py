"""Selection, token masks and the sampler."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.tilelang_ops.operations import DTYPES, call, covered, empty, launch, number_dtype


@call
def top_k_positions(scores: Tensor, k: int) -> Tensor:
    n, width = scores.shape
    if not covered(scores) or width == 0:
        return NotImplemented
    out = empty(scores, n, k, dtype=torch.int32)
    launch("top_k_positions_tl", (width, k, DTYPES[scores.dtype]), scores.contiguous(), out)
    return out


@call
def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    launch("apply_token_bitmask_tl", (logits.shape[1],), logits.contiguous(), bitmask.contiguous(), out)
    return out


@call
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
    n, vocab = logits.shape
    if logits.dtype is not torch.float32:
        return NotImplemented
    tokens, largest = empty(logits, n, dtype=torch.int64), empty(logits, n)
    temperature, top_p, min_p = (t.to(number_dtype(logits)) for t in (temperature, top_p, min_p))
    logits = logits.contiguous()
    key = torch.zeros(n, dtype=torch.uint32, device=logits.device)
    last = torch.full((n,), vocab, dtype=torch.int32, device=logits.device)
    if most_candidates:
        launch("find_candidates_tl", (vocab,), logits, num_candidates.contiguous(), key, last)
    parameters = (t.contiguous() for t in (temperature, key, last, top_p, min_p, seeds, counters))
    launch("draw_tokens_tl", (vocab,), logits, *parameters, tokens, largest)
    return tokens, largest
