"""Token masks on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.cpu.library import functions
from deepinfer.kernels.reference import bitmask as reference  # noqa: F401  (defines the operation)
from deepinfer.kernels.registry import backend


@backend("apply_token_bitmask", "cpu")
def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    kernels = functions()
    rows_are_plain = logits.dtype is torch.float32 and logits.stride(1) == 1 and bitmask.stride(1) == 1
    if kernels is None or not rows_are_plain:
        return NotImplemented
    n, vocab = logits.shape
    out = torch.empty(n, vocab, dtype=torch.float32)
    kernels["apply_token_bitmask"](
        logits.data_ptr(), logits.stride(0), bitmask.data_ptr(), bitmask.stride(0), n, vocab, out.data_ptr()
    )  # fmt: skip
    return out
