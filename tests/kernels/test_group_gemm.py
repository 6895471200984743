"""BF16 and FP8 products, dense and of groups of rows, agree with float64 over what their operands hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm import group_gemm
from deepinfer.kernels.deep_gemm.group_gemm import bf16_gemm, grouped_bf16_gemm, grouped_fp8_gemm
from tests.kernels.matrix_cases import (
    TOLERANCE,
    dequantize,
    gpu,
    hopper,
    quantize,
    random_matrix,
    ranges,
    relative_error,
)

BF16_TOLERANCE = 2.5e-3  # FP32 sums, rounded once

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(params=[0, 1 << 20], ids=["many", "few"])
def each_kernel(request, monkeypatch):
    """The kernel for many rows a group and the one for few, whatever the rows."""
    monkeypatch.setattr(group_gemm, "FEW_ROWS", request.param)


CASES = [
    # N, K, counts: ragged, empty, more rows than a tile has, V4.1-Flash's experts
    (256, 128, [16, 0, 5]),
    (512, 256, [1, 130, 64, 33]),
    (600, 480, [96, 127, 129, 200, 0, 3]),
    (2304, 5120, [70, 50]),
    (5120, 2304, [9, 0, 300]),
    (136, 1312, [0, 0, 0, 20]),
    (256, 128, [0, 0]),
]


def check(out: Tensor, x: Tensor, weights: Tensor, begins: Tensor, counts: list[int], tolerance: float) -> Tensor:
    """Rows of each group are right, the others as they were (NaN); returns which rows belong to a group."""
    written = torch.zeros(len(x), dtype=torch.bool, device="cuda")
    for group, (begin, size) in enumerate(zip(begins.tolist(), counts, strict=True)):
        rows = slice(begin, begin + size)
        written[rows] = True
        if size:
            assert relative_error(out[rows], x[rows] @ weights[group].T) < tolerance
    assert out[~written].isnan().all()
    return written


@gpu
@hopper
@pytest.mark.parametrize("room", [None, 310], ids=["contiguous", "masked"])
@pytest.mark.parametrize("n, k, counts", CASES)
def test_grouped_bf16(n, k, counts, room, each_kernel):
    begins, count, total = ranges(counts, room)
    g = torch.Generator().manual_seed(n + k)
    x = random_matrix(g, total, k, 1.0).bfloat16()
    w = random_matrix(g, len(counts) * n, k, 1.0).bfloat16().view(len(counts), n, k)
    wide = torch.full((total, n + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
    out = grouped_bf16_gemm(x, begins, count, w, wide[:, :n])
    written = check(out, x.double(), w.double(), begins, counts, BF16_TOLERANCE)
    assert wide[:, n:].isnan().all()
    again = torch.full_like(out, float("nan"))
    poisoned = x.masked_fill(~written[:, None], float("nan"))  # rows of no group have no say
    assert torch.equal(grouped_bf16_gemm(poisoned, begins, count, w, again)[written], out[written])


@gpu
@hopper
@pytest.mark.parametrize("by_row", [False, True], ids=["blocks", "rows"])
@pytest.mark.parametrize("room", [None, 310], ids=["contiguous", "masked"])
@pytest.mark.parametrize("n, k, counts", CASES)
def test_grouped_fp8(n, k, counts, room, by_row, each_kernel):
    begins, count, total = ranges(counts, room)
    g = torch.Generator().manual_seed(n + k)
    x, x_scales = quantize(random_matrix(g, total, k, 1.0), 1)
    weights = [quantize(random_matrix(g, n, k, 1.0), 128) for _ in counts]
    w, w_scales = torch.stack([values for values, _ in weights]), torch.stack([scales for _, scales in weights])
    wide = torch.stack([dequantize(*weight, 128) for weight in weights])
    if by_row:
        w_scales = torch.rand(len(counts), n, generator=g).cuda() + 0.1
        wide = w.double() * w_scales.double().unsqueeze(-1)
    out = torch.full((total, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    grouped_fp8_gemm(x, x_scales, begins, count, w, w_scales, out)
    written = check(out, dequantize(x, x_scales), wide, begins, counts, TOLERANCE)
    again = torch.full_like(out, float("nan"))
    assert torch.equal(grouped_fp8_gemm(x, x_scales, begins, count, w, w_scales, again)[written], out[written])


@gpu
@hopper
@pytest.mark.parametrize("shape", [(1, 8, 64), (7, 136, 72), (128, 5120, 512), (300, 520, 1032), (513, 1280, 5120)])
def test_dense_bf16(shape, each_kernel):
    m, n, k = shape
    g = torch.Generator().manual_seed(m)
    x, w = random_matrix(g, m, k, 1.0).bfloat16(), random_matrix(g, n, k, 1.0).bfloat16()
    wide = torch.full((m, k + 64), float("nan"), dtype=torch.bfloat16, device="cuda")
    wide[:, 32 : 32 + k] = x
    out = bf16_gemm(wide[:, 32 : 32 + k], w)  # rows apart
    assert relative_error(out, x.double() @ w.double().T) < BF16_TOLERANCE
    assert torch.equal(bf16_gemm(x, w), out)
    assert torch.equal(bf16_gemm(x[:1], w), out[:1])  # a row does not depend on the others
    assert bf16_gemm(x[:0], w).shape == (0, n)


@gpu
@hopper
def test_bf16_extremes(each_kernel):
    x = torch.full((40, 256), 3e38, device="cuda").bfloat16()
    w = torch.full((64, 256), 1e-38, device="cuda").bfloat16()
    expected = x.double() @ w.double().T
    assert relative_error(bf16_gemm(x, w), expected) < BF16_TOLERANCE
    assert torch.equal(bf16_gemm(x, x[:, :256][:8]), torch.full((40, 8), float("inf"), device="cuda").bfloat16())
    x[3, 5] = float("nan")
    result = bf16_gemm(x, w)
    assert result[3].isnan().all() and result[:3].isfinite().all() and result[4:].isfinite().all()


@pytest.mark.parametrize(
    "x, w, counts, message",
    [
        (torch.zeros(4, 64), torch.zeros(1, 8, 64), [4], "bfloat16"),
        (torch.zeros(4, 64).bfloat16(), torch.zeros(1, 8, 32).bfloat16(), [4], "bfloat16"),
        (torch.zeros(4, 64).bfloat16(), torch.zeros(1, 9, 64).bfloat16(), [4], "a multiple of 8"),
        (torch.zeros(4, 64).bfloat16(), torch.zeros(2, 8, 64).bfloat16(), [4], r"begins must be .* \[2\]"),
    ],
)
def test_products_that_are_refused(x, w, counts, message):
    count = torch.tensor(counts, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        grouped_bf16_gemm(x, count * 0, count, w)
