"""CPU kernels of products in INT8, where the processor has instructions for them."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.cpu.library import functions, ready
from deepinfer.kernels.reference import int8  # noqa: F401  (defines the operations)
from deepinfer.kernels.registry import backend


def multiplies_int8() -> bool:
    """Whether this processor has them."""
    kernels = functions()
    return kernels is not None and bool(kernels["multiplies_int8"]())


@backend("linear_int8", "cpu")
def linear_int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    kernels = functions()
    if kernels is None or not multiplies_int8() or x.dtype is not torch.float32 or x.stride(1) != 1:
        return NotImplemented
    (n, k), columns = x.shape, len(scales)
    out = torch.empty(n, columns, dtype=torch.float32)
    kernels["linear_int8"](
        x.data_ptr(), x.stride(0), weight.data_ptr(), scales.data_ptr(), n, k, columns, out.data_ptr()
    )  # fmt: skip
    return out


@backend("chain_drafts", "cpu")
def chain_drafts(base: Tensor, embed: Tensor, weight: Tensor, scales: Tensor, tokens: Tensor) -> Tensor:
    kernels = functions()
    if kernels is None or not multiplies_int8() or not ready(base, embed):
        return NotImplemented
    n, drafts, columns = base.shape
    tokens = tokens.contiguous()
    out = torch.empty(n, drafts, dtype=torch.int64)
    kernels["chain_drafts"](
        base.data_ptr(), embed.data_ptr(), weight.data_ptr(), scales.data_ptr(), tokens.data_ptr(), n, drafts, columns,
        embed.shape[1], out.data_ptr(),
    )  # fmt: skip
    return out
