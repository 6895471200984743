"""FP8 linears: activations rounded for 32 values, weights E4M3 with one scale a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm.activations import quantize_rows
from deepinfer.kernels.deep_gemm.fp8_few_rows import fp8_few_rows
from deepinfer.kernels.deep_gemm.fp8_gemm import fp8_gemm
from deepinfer.kernels.reference.quant import e4m3_round

LARGEST = 448.0  # of E4M3
ROWS_AT_ONCE = 4096
FEW_ROWS = 64  # up to which the kernel for few rows is the faster


@dataclass(frozen=True)
class Fp8Weight:
    """A weight [O, K]: E4M3 `values` times float32 `scales` [O]."""

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Fp8Weight:
        """From the values [O, K] of an FP8 weight in any float dtype; the scale of a row is a power of two.

        Exact but for values below 2^-14 of the largest of their row, which E4M3 cannot hold beside it.
        """
        values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
        scales = torch.empty(weight.shape[0], device=weight.device)
        for start in range(0, len(weight), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            wide = weight[rows].float()
            largest = wide.abs().amax(1).clamp_min(2.0**-100)
            scales[rows] = torch.exp2(torch.ceil(torch.log2(largest / LARGEST)))
            values[rows] = e4m3_round(wide / scales[rows].unsqueeze(1)).to(torch.float8_e4m3fn)
        return cls(values, scales)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __getitem__(self, rows: slice) -> Fp8Weight:
        return Fp8Weight(self.values[rows], self.scales[rows])


def fp8_product(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, out: Tensor | None = None) -> Tensor:
    """`fp8_gemm`, or `fp8_few_rows` where a has few: a [M, K] b [N, K]^T -> BF16 [M, N].

    The kernel before on the stream must be `quantize_rows`, or one that does not let this one start.
    """
    few = 0 < len(a) <= FEW_ROWS and a.shape[1] > 0
    return (fp8_few_rows if few else fp8_gemm)(a, a_scales, b, b_scales, out)


def fp8_linear(x: Tensor, weight: Fp8Weight) -> Tensor:
    """x BF16 [N, K] @ weight.T -> BF16 [N, O]; x is rounded as `round_fp8` does. O % 8 == 0. Raises ValueError."""
    return fp8_product(*quantize_rows(x), weight.values, weight.scales)
