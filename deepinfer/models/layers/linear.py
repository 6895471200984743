"""Linear layers whose checkpoint weights are FP8 or FP4, and those that are computed in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import ops
from deepinfer.kernels.deep_gemm.linear import Fp8Weight, fp8_linear
from deepinfer.kernels.reference.int8 import COLUMNS, DEPTH, arrange, quantize_rows
from deepinfer.kernels.reference.quant import dequantize_fp8_weight, quantize_fp8_weight


@dataclass(frozen=True)
class StoredFp8:
    """A weight [O, K] as checkpoints store it: E4M3 bytes, and one E8M0 byte for 32 x 32 of them."""

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> StoredFp8 | Tensor:
        """The stored form of a weight that was widened; the weight itself where it is not exactly that."""
        if weight.shape[1] % 32:
            return weight
        values, scales = quantize_fp8_weight(weight)
        stored = cls(values.view(torch.uint8), scales)
        return stored if torch.equal(stored.widened(weight.dtype), weight) else weight

    def widened(self, dtype: torch.dtype) -> Tensor:
        return dequantize_fp8_weight(self.values.view(torch.float8_e4m3fn), self.scales, dtype)

    def __getitem__(self, rows: slice) -> StoredFp8 | Tensor:
        if (rows.start or 0) % 32:
            return self.widened(torch.float32)[rows]
        values = self.values[rows]
        first = (rows.start or 0) // 32
        return StoredFp8(values, self.scales[first : first - (-len(values) // 32)])


@dataclass(frozen=True)
class Int8Weight:
    """A weight [O, K] rounded to INT8, for drafts alone: they may be a little wrong, and half the bytes are read."""

    values: Tensor  # as `reference.int8.arrange` has them
    scales: Tensor  # float32 [O]

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight | Tensor:
        """The weight itself where its shape does not fit."""
        if weight.shape[0] % COLUMNS or weight.shape[1] % DEPTH:
            return weight
        values, scales = quantize_rows(weight)
        return cls(arrange(values), scales)


def quantized_linear(x: Tensor, weight: Tensor | Fp8Weight | StoredFp8, quantize_activations: bool) -> Tensor:
    """x @ weight.T, with the activation rounded to FP8 (1 x 32 groups) first when the switch is on.

    A `Fp8Weight` is there for a kernel that always rounds (models/fp8.py).
    """
    if isinstance(weight, Fp8Weight):
        return fp8_linear(x, weight)
    x = ops.round_fp8(x) if quantize_activations else x
    return ops.linear_fp8(x, weight.values, weight.scales) if isinstance(weight, StoredFp8) else ops.linear(x, weight)


def widened(weight: Tensor) -> Tensor:
    """A weight [O, K] for `wide_linear`: in at least float32, but in BF16 where tensor cores sum into float32, or where
    a CPU kernel widens it as it reads it, and it is exactly that."""
    if weight.is_cuda and weight.dtype is torch.bfloat16:
        return weight
    if ops.reads_narrow_weights(weight.dtype, weight.device) and torch.equal(weight.bfloat16().float(), weight):
        return weight.bfloat16()
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def wide_linear(x: Tensor, weight: Tensor | Int8Weight) -> Tensor:
    """x [N, K] @ weight.T in at least float32 -> [N, O]. Products of BF16 values are exact there: none is widened."""
    if isinstance(weight, Int8Weight):
        return ops.linear_int8(x, weight.values, weight.scales)
    if not weight.is_cuda or weight.dtype is not torch.bfloat16:
        return ops.linear(x.to(torch.promote_types(weight.dtype, torch.float32)), weight)
    if len(x) == 0:
        return torch.empty(0, len(weight), dtype=torch.float32, device=x.device)
    return torch.mm(x, weight.t(), out_dtype=torch.float32)
