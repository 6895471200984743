"""FP8 products of few rows for Hopper agree with float64 over what their operands hold; all need the GPU."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.deep_gemm.activations import quantize_rows
from deepinfer.kernels.deep_gemm.fp8_few_rows import fp8_few_rows
from tests.kernels.matrix_cases import TOLERANCE, dequantize, gpu, hopper, quantize, random_matrix, relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@gpu
@hopper
@pytest.mark.parametrize("by_row", [True, False], ids=["rows", "blocks"])
@pytest.mark.parametrize("blocks", [None, 1, 2, 3, 7, 50, 131])
@pytest.mark.parametrize("shape", [(136, 128), (64, 1312), (1792, 5120), (520, 6144)])
def test_product_of_few_rows(shape, blocks, by_row):
    """Any number of rows, each of which does not depend on the others; also while the rounding still runs."""
    n, k = shape
    g = torch.Generator().manual_seed(n + k)
    x = random_matrix(g, 128, k, 1.0).bfloat16()
    w, w_scales = quantize(random_matrix(g, n, k, 1.0), 1 if by_row else 128)
    wide_w = dequantize(w, w_scales, 128)
    if by_row:
        w_scales = w_scales.amax(1).contiguous()
        wide_w = w.double() * w_scales.double()[:, None]
    values, scales = quantize_rows(x)
    expected = dequantize(values, scales) @ wide_w.T
    result = fp8_few_rows(values, scales, w, w_scales, blocks=blocks)
    assert relative_error(result, expected) < TOLERANCE
    wide = torch.full((128, n + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
    for m in (1, 3, 8, 9, 16, 31, 33, 64, 65, 128):
        assert torch.equal(fp8_few_rows(*quantize_rows(x[:m]), w, w_scales, blocks=blocks), result[:m])
        out = wide[:m, :n].fill_(float("nan"))
        fp8_few_rows(values[:m], scales[:m], w, w_scales, out, blocks=blocks, starts_early=False)
        assert torch.equal(out, result[:m]) and wide[:, n:].isnan().all()


@gpu
@hopper
@pytest.mark.parametrize("by_row", [True, False], ids=["rows", "blocks"])
def test_broken_rows_of_few(by_row):
    torch.manual_seed(12)
    x = torch.randn(40, 512, device="cuda").bfloat16()
    w, w_scales = quantize(torch.randn(256, 512, device="cuda"), 1 if by_row else 128)
    w_scales = w_scales.amax(1).contiguous() if by_row else w_scales
    whole = fp8_few_rows(*quantize_rows(x), w, w_scales)
    x[5], x[7, 100] = torch.inf, torch.nan
    values, scales = quantize_rows(x)
    scales[11] = 1e-37
    w_scales.view(-1)[-1] = torch.nan
    out = fp8_few_rows(values, scales, w, w_scales)
    bad = 1 if by_row else 128
    assert not out[[5, 7]].isfinite().any() and out[:, 256 - bad :].isnan().all()
    good = [i for i in range(40) if i not in (5, 7, 11)]
    assert torch.equal(out[good, : 256 - bad], whole[good, : 256 - bad])
    assert out[11, : 256 - bad].abs().max() < 1e-30
