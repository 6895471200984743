"""Masks of allowed tokens, a bit a token, applied to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.registry import operation


@operation
def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """A copy of logits float32 [R, V] with -inf where bitmask int32 [R, ceil(V / 32)] has no bit.

    Token t is bit t % 32 of word t // 32.
    """
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = (bitmask[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(allowed == 0, -torch.inf)
