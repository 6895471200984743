"""Small launches of all of deep_gemm for compute-sanitizer: python -m tests.kernels.sanitized_gemm PART ...

Parts: dense, experts, groups, logits. Each launches every kernel of its files at least once, on few processors so that
a block has several tiles, and compares with float64 as the tests do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from deepinfer.kernels.deep_gemm import (
    fp8_few_rows,
    fp8_gemm,
    fp8_variants,
    group_gemm,
    indexer,
    moe_gemm,
    mqa_logits,
)
from tests.kernels import test_deep_gemm as products
from tests.kernels import test_fp8_few_rows as few_rows
from tests.kernels import test_group_gemm as groups
from tests.kernels import test_mqa_logits as scores
from tests.kernels.matrix_cases import TOLERANCE, dequantize, quantize, random_matrix, relative_error


class Patches:
    """The part of pytest's monkeypatch that the tests use."""

    def setattr(self, target: Any, name: str, value: Any) -> None:
        setattr(target, name, value)


def on_few_processors(count: int) -> None:
    for module in (fp8_gemm, fp8_few_rows, group_gemm, moe_gemm, mqa_logits):
        module.processors = lambda device: count  # type: ignore[attr-defined]


def dense() -> None:
    g = torch.Generator().manual_seed(0)
    a, a_scales = quantize(random_matrix(g, 300, 304, 1.0), 1)
    b, b_scales = quantize(random_matrix(g, 264, 304, 1.0), 128)
    expected = dequantize(a, a_scales) @ dequantize(b, b_scales, 128).T
    for tile in fp8_variants.TILES:
        out = fp8_gemm.fp8_gemm(a, a_scales, b, b_scales, tile=tile)
        assert relative_error(out, expected) < TOLERANCE
    products.test_dense_product_with_a_scale_a_row_of_b((65, 512, 640))
    for by_row in (True, False):
        few_rows.test_product_of_few_rows((264, 1312), 3, by_row)
    products.test_activations_are_rounded_for_32_values((9, 160))


def experts() -> None:
    for few in (0, 1 << 20):
        moe_gemm.FEW_TOKENS = few
        for room in (None, 210):
            products.test_grouped_product(264, 288, [81, 0, 3], room, None)
        products.test_grouped_gate_and_up(96, 160, [16, 0, 35], None)
        products.test_routed_experts_agree_with_the_reference(5, 8, 2, None)
    products.test_dense_product_with_fp4_weights(33)


def grouped() -> None:
    for few in (0, 1 << 20):
        group_gemm.FEW_ROWS = few
        for room in (None, 310):
            groups.test_grouped_bf16(264, 288, [3, 0, 129], room, None)
            for by_row in (False, True):
                groups.test_grouped_fp8(264, 288, [3, 0, 129], room, by_row, None)
        groups.test_dense_bf16((7, 136, 72), None)


def logits() -> None:
    scores.test_logits_of_ranges(9, 130)
    for queries in (1, 2, 6):
        scores.test_logits_of_pages(5, queries, 300)
        scores.test_logits_of_fp4_pages(5, queries, 300, 64)
    for rows, sequences in ((17, 17), (20, 3)):
        scores.test_index_scores_agree_with_the_reference(64, rows, sequences, Patches())
    assert indexer.FEWEST_SCORES == 0


PARTS: dict[str, Callable[[], None]] = {"dense": dense, "experts": experts, "groups": grouped, "logits": logits}


def main(chosen: list[str]) -> None:
    """Run the named parts, or all."""
    on_few_processors(8)
    torch.manual_seed(0)
    for name in chosen or PARTS:
        PARTS[name]()
        torch.cuda.synchronize()
        print("done", name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
