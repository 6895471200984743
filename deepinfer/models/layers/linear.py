"""Linear layers whose checkpoint weights are FP8 or FP4, and those that are computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels import ops
from deepinfer.kernels.deep_gemm.linear import Fp8Weight, fp8_linear


def quantized_linear(x: Tensor, weight: Tensor | Fp8Weight, quantize_activations: bool) -> Tensor:
    """x @ weight.T, with the activation rounded to FP8 (1 x 32 groups) first when the switch is on.

    A weight in FP8 is there for a kernel that always rounds (models/fp8.py).
    """
    if isinstance(weight, Fp8Weight):
        return fp8_linear(x, weight)
    return ops.linear(ops.round_fp8(x) if quantize_activations else x, weight)


def widened(weight: Tensor) -> Tensor:
    """A weight [O, K] for `wide_linear`: in at least float32, but in BF16 where tensor cores sum into float32."""
    if weight.is_cuda and weight.dtype is torch.bfloat16:
        return weight
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, K] @ weight.T in at least float32 -> [N, O]. Products of BF16 values are exact there: none is widened."""
    if weight.dtype is not torch.bfloat16:
        return ops.linear(x.to(weight.dtype), weight)
    if len(x) == 0:
        return torch.empty(0, len(weight), dtype=torch.float32, device=x.device)
    return torch.mm(x, weight.t(), out_dtype=torch.float32)
