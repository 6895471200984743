"""Linears in float32: widened weights, or BF16 ones whose products are summed in float32; the same numbers."""

from __future__ import annotations

import pytest
import torch

from deepinfer.models.layers.linear import wide_linear, widened


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 5, 64])
def test_products_are_exact_and_sums_wide(rows: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 384, generator=generator).to(dtype)
    weight = torch.randn(200, 384, generator=generator).to(dtype)
    got = wide_linear(x.to(device), widened(weight.to(device)))
    assert got.dtype == torch.promote_types(dtype, torch.float32) and got.shape == (rows, 200)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(got.cpu().double(), expected, rtol=0, atol=2e-4)  # BF16 sums would be off by 0.1
