"""Products and logits refuse what their kernels would read wrongly or past its end; no GPU is needed to be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm.fp4_weights import ExpertWeights, arrange
from deepinfer.kernels.deep_gemm.fp8_few_rows import fp8_few_rows
from deepinfer.kernels.deep_gemm.fp8_gemm import fp8_gemm
from deepinfer.kernels.deep_gemm.group_gemm import grouped_bf16_gemm, grouped_fp8_gemm
from deepinfer.kernels.deep_gemm.moe_gemm import grouped_gate_up, grouped_gemm
from deepinfer.kernels.deep_gemm.mqa_logits import PAGE_BYTES, mqa_logits, paged_mqa_logits
from tests.kernels.matrix_cases import E4M3

Case = tuple[Callable[..., Any], dict[str, Any]]


def fp8(*shape: int) -> Tensor:
    return torch.zeros(*shape).to(E4M3)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def experts(gate_up: bool, count: int = 2) -> ExpertWeights:
    packed = torch.zeros(count, 64, 64, dtype=torch.uint8)
    return arrange(packed, torch.full((count, 64, 4), 127, dtype=torch.uint8), gate_up)


def case(name: str) -> Case:
    """A function and arguments that it would take, on a CPU."""
    tables = {"begins": ints(0, 3), "counts": ints(3, 2)}
    rows = {"x": fp8(5, 128), "x_scales": torch.ones(5, 1), **tables}
    ranges = {"starts": ints(0, 0), "ends": ints(3, 4)}
    queries = {"weights": torch.ones(2, 32)}
    keys = {"keys": fp8(4, 128), "key_scales": torch.ones(4)}
    pages = {"pages": torch.zeros(3, PAGE_BYTES, dtype=torch.uint8), "block_table": ints(0, 1)[:, None]}
    dense = {"a": fp8(4, 128), "a_scales": torch.ones(4, 1), "b": fp8(8, 128), "b_scales": torch.ones(8)}
    few = {"x": fp8(4, 128), "x_scales": torch.ones(4, 1), "w": fp8(8, 128), "w_scales": torch.ones(8)}
    cases: dict[str, Case] = {
        "dense": (fp8_gemm, dense),
        "few rows": (fp8_few_rows, few),
        "bf16 groups": (
            grouped_bf16_gemm,
            {"x": torch.ones(5, 64).bfloat16(), **tables, "w": torch.ones(2, 8, 64).bfloat16()},
        ),
        "fp8 groups": (grouped_fp8_gemm, {**rows, "w": fp8(2, 8, 128), "w_scales": torch.ones(2, 8)}),
        "experts": (grouped_gemm, {**rows, "weights": experts(False)}),
        "gate and up": (grouped_gate_up, {**rows, "weights": experts(True), "gates": torch.ones(5), "limit": 7.0}),
        "ranges": (mqa_logits, {"q": fp8(2, 32, 128), **keys, **queries, **ranges}),
        "pages": (
            paged_mqa_logits,
            {"q": fp8(2, 1, 32, 128), **pages, **queries, "visible": ints(3, 4), "width": 64},
        ),
    }
    return cases[name]


def every_other(*values: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype).repeat_interleave(2)[::2]


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("dense", {"a_scales": torch.ones(4, 2)}, "a_scales must be"),
        ("dense", {"b_scales": torch.ones(8).double()}, "b_scales must be contiguous torch.float32"),
        ("dense", {"b_scales": torch.ones(16)[::2]}, r"b_scales .* strides \[2\]"),
        ("dense", {"b_scales": torch.ones(8, device="meta")}, "b_scales must be on cpu"),
        ("dense", {"out": torch.zeros(4, 8)}, "out must be bfloat16"),
        ("dense", {"out": torch.zeros(8, 4).bfloat16().T}, "multiples of 16 bytes"),
        ("dense", {"b": fp8(9, 128), "b_scales": torch.ones(9)}, "columns a multiple of 8"),
        ("few rows", {"w_scales": torch.ones(7)}, r"w_scales must be contiguous torch.float32 \[8\]"),
        ("bf16 groups", {"begins": ints(0, 3).long()}, "begins must be contiguous torch.int32"),
        ("bf16 groups", {"counts": every_other(3, 2, dtype=torch.int32)}, "counts must be contiguous"),
        ("bf16 groups", {"out": torch.zeros(5, 8).half()}, "out must be bfloat16"),
        ("fp8 groups", {"w_scales": torch.ones(2, 7)}, "w_scales must be"),
        ("fp8 groups", {"counts": ints(3, 2, 0)}, r"counts must be contiguous torch.int32 \[2\]"),
        ("experts", {"counts": None}, "counts may be None for one expert only"),
        ("experts", {"weights": experts(False, 1), "counts": None, "begins": ints(0)}, "and with the other"),
        ("experts", {"begins": every_other(0, 3, dtype=torch.int32)}, "begins must be contiguous"),
        ("experts", {"out": torch.zeros(5, 64)}, "out must be bfloat16"),
        ("experts", {"out": torch.zeros(6, 64).bfloat16()}, r"out must be bfloat16 \[5, 64\]"),
        ("experts", {"out_rows": torch.arange(5)}, "out_rows must be contiguous torch.int32"),
        ("experts", {"out_rows": ints(0, 1)}, r"out_rows must be contiguous torch.int32 \[5\]"),
        ("experts", {"weights": experts(True)}, "use grouped_gate_up"),
        ("gate and up", {"gates": torch.ones(10)[::2]}, "gates must be contiguous"),
        ("gate and up", {"weights": experts(False)}, "arranged with gate_up"),
        ("ranges", {"ends": ints(3, 4).long()}, "ends must be contiguous torch.int32"),
        ("ranges", {"starts": every_other(0, 0, dtype=torch.int32)}, "starts must be contiguous"),
        ("ranges", {"key_scales": torch.ones(4).bfloat16()}, "key_scales must be contiguous torch.float32"),
        ("ranges", {"keys": torch.zeros(4, 128)}, "keys must be float8_e4m3fn"),
        ("pages", {"visible": torch.tensor([3, 4])}, "visible must be contiguous torch.int32"),
        ("pages", {"block_table": torch.zeros(2, 1, dtype=torch.int64)}, "block_table must be int32"),
        ("pages", {"pages": torch.zeros(3, 64, dtype=torch.uint8)}, "pages must be uint8"),
    ],
)
def test_refused(name: str, changed: dict[str, Any], message: str) -> None:
    function, arguments = case(name)
    with pytest.raises(ValueError, match=message):
        function(**{**arguments, **changed})


def test_no_keys_are_no_logits() -> None:
    """Without keys nothing is launched; columns of `width` are -inf all the same."""
    function, arguments = case("ranges")
    nothing = {"keys": fp8(0, 128), "key_scales": torch.ones(0), "starts": ints(0, 0), "ends": ints(0, 0)}
    assert (function(**{**arguments, **nothing}, width=7) == -torch.inf).all()
