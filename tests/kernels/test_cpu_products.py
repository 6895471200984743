"""Products of the C kernels with stored weights: a row has the same bits among any number, and no number is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.cpu import cpu_backend_status
from deepinfer.kernels.ops import linear, linear_fp8, moe_experts_fp4
from deepinfer.kernels.reference.quant import dequantize_fp8_weight
from tests.kernels.test_ops_backends import compare_exactly

pytestmark = pytest.mark.skipif(not cpu_backend_status().active, reason="only the C kernels promise this")
ROWS = 27  # more than two blocks of any kernel
K = 96


def fp8_weight(columns: int, scales: tuple[int, int] = (110, 128), seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random bytes but NaN, [columns, K], and E8M0 bytes between two."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (columns, K), generator=g, dtype=torch.uint8)
    values[(values & 0x7F) == 0x7F] = 1
    return values, torch.randint(*scales, (-(-columns // 32), K // 32), generator=g, dtype=torch.uint8)


def widened(values: Tensor, scales: Tensor) -> Tensor:
    return dequantize_fp8_weight(values.view(torch.float8_e4m3fn), scales, torch.float32)


def some_linear(kind: str, columns: int) -> Callable[[Tensor], Tensor]:
    values, scales = fp8_weight(columns)
    if kind == "fp8":
        return lambda x: linear_fp8(x, values, scales)
    weight = widened(values, scales)
    weight = weight.bfloat16() if kind == "bf16" else weight
    return lambda x: linear(x, weight)


@pytest.mark.parametrize("columns", [1, 31, 70])
@pytest.mark.parametrize("kind", ["fp8", "bf16", "float32"])
def test_a_row_does_not_depend_on_how_many_there_are(kind: str, columns: int) -> None:
    product = some_linear(kind, columns)
    x = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(1))
    together = product(x)
    for count in range(1, 15):
        for start in (0, ROWS - count):
            compare_exactly(product(x[start : start + count]), together[start : start + count])


def test_fp4_experts_give_a_row_the_same_bits_in_any_batch() -> None:
    g = torch.Generator().manual_seed(2)
    experts, dim, inner, k = 5, 64, 32, 2
    codes = [torch.randint(0, 256, shape, generator=g, dtype=torch.uint8) for shape in
             ((experts, 2 * inner, dim // 2), (experts, dim, inner // 2))]  # fmt: skip
    scales = [torch.randint(110, 130, (*c.shape[:2], c.shape[2] // 16), generator=g, dtype=torch.uint8) for c in codes]
    weights = codes[0], scales[0], codes[1], scales[1]
    x, gates = torch.randn(ROWS, dim, generator=g), torch.rand(ROWS, k, generator=g)
    chosen = torch.rand(ROWS, experts, generator=g).argsort(1)[:, :k].int()
    together = moe_experts_fp4(x, chosen, gates, *weights, 10.0, False)
    for count in (1, 2, 6, 7, 13):
        rows = slice(3, 3 + count)
        alone = moe_experts_fp4(x[rows], chosen[rows].contiguous(), gates[rows], *weights, 10.0, False)
        compare_exactly(alone, together[rows])


@pytest.mark.parametrize("scales", [(20, 30), (110, 128), (120, 200)])
def test_fp8_weights_give_what_their_float_values_give(scales: tuple[int, int]) -> None:
    values, exponents = fp8_weight(70, scales)
    x = torch.randn(9, K, generator=torch.Generator().manual_seed(3))
    compare_exactly(linear_fp8(x, values, exponents), linear(x, widened(values, exponents)))


@pytest.mark.parametrize("size", [1e-20, 1e6, 1e30])
def test_large_and_small_rows_beside_others(size: float) -> None:
    """Neither a scaled activation nor a scaled weight leaves the range of float32 where the product does not."""
    values, exponents = fp8_weight(40)
    x = torch.randn(8, K, generator=torch.Generator().manual_seed(4))
    x[5] *= size
    expected = (x.double() @ widened(values, exponents).double().T).float()
    torch.testing.assert_close(linear_fp8(x, values, exponents), expected, rtol=2e-5, atol=1e-4 * min(size, 1.0))


def test_numbers_that_are_none_reach_their_rows_and_columns_only() -> None:
    values, exponents = fp8_weight(70)
    x = torch.randn(14, K, generator=torch.Generator().manual_seed(5))
    clean = linear_fp8(x, values, exponents)
    x[3, 10], x[13, 0] = float("nan"), float("inf")
    values[33, 5], values[64, 95] = 0x7F, 0xFF
    values[:, 0] = 0x38  # times infinity
    result = linear_fp8(x, values, exponents)
    expected = linear(x, widened(values, exponents))
    assert bool((result.isnan() == expected.isnan()).all()) and bool(result[:, [33, 64]].isnan().all())
    assert bool(result[3].isnan().all()) and bool(result[13, :33].isinf().all())
    others = [row for row in range(14) if row not in (3, 13)]
    assert bool(result[others][:, [0, 32, 34, 69]].isfinite().all())
    assert clean.isfinite().all()
