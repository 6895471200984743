"""Linear layers whose checkpoint weights are FP8 or FP4."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels import ops


def quantized_linear(x: Tensor, weight: Tensor, quantize_activations: bool) -> Tensor:
    """x @ weight.T, with the activation rounded to FP8 (1 x 32 groups) first when the switch is on."""
    return ops.linear(ops.round_fp8(x) if quantize_activations else x, weight)
