"""What the Triton kernels share on the host side."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16)


def covered(*tensors: Tensor) -> bool:
    """Whether the kernels compute with these dtypes; float64 and float16 are left to the references."""
    return all(t.dtype in FLOATS for t in tensors)


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """x with rows (last dimension) of adjacent values at one stride, and that stride; copied only if need be."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    return x.contiguous(), x.shape[-1]


def contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each as it is, or copied if need be."""
    return tuple(t.contiguous() for t in tensors)
