"""The experts' products compiled for the CPU, their threads as fibers, against float64: no GPU needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm.fp4_weights import ExpertWeights, arrange, natural_columns, ordered_columns
from deepinfer.kernels.deep_gemm.moe_gemm import SOURCE, _Params, _Variant
from deepinfer.kernels.reference.basic import swiglu
from deepinfer.kernels.reference.quant import dequantize_fp4_weight, fp8_round_trip
from tests.kernels.matrix_cases import E4M3, TOLERANCE, dequantize, quantize, random_matrix, relative_error
from tests.kernels.on_host import compile_on_host, copy_sources, needs_compiler

pytestmark = needs_compiler
BLOCKS = 2  # of the persistent kernel
IMITATED = {"products.cuh": "products_on_host.cuh", "tma.cuh": "tma_on_host.cuh"}
ENTRY = """
extern "C" bool on_host(const Params* p, const TensorMap* x, const TensorMap* scales, int blocks) {
    std::mt19937 random(p->tokens);
    forget_launch(&random);
    return run(1, blocks, THREADS, 232448, [=] { moe_gemm(*p, *x, *scales); });
}
"""


class HostMap(ctypes.Structure):
    """TensorMap of tma_on_host.cuh."""

    _fields_ = [
        (name, ctypes.c_uint64) for name in "base rows columns stride box_rows box_columns size swizzled".split()
    ]
    _fields_.append(("unused", ctypes.c_uint64 * 8))


def host_map(x: Tensor, box: tuple[int, int], swizzled: bool) -> HostMap:
    size = x.element_size()
    return HostMap(x.data_ptr(), x.shape[0], x.shape[1], x.stride(0) * size, *box, size, int(swizzled))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[_Variant], Any]:
    folder = tmp_path_factory.mktemp("moe_gemm")
    copy_sources(folder, SOURCE, IMITATED)

    @cache
    def compile_for_host(variant: _Variant) -> Any:
        on_host = compile_on_host(folder, variant.build(), ENTRY).on_host
        on_host.restype = ctypes.c_bool
        return on_host

    return compile_for_host


Launch = Callable[[Tensor, Tensor, Tensor, Tensor, ExpertWeights, _Params], None]


@pytest.fixture(params=[False, True], ids=["many", "few"])
def launch(request, compiled) -> Launch:
    """As moe_gemm._launch; x with its columns in the order of the matrix."""

    def run(
        x: Tensor, x_scales: Tensor, begins: Tensor, counts: Tensor, weights: ExpertWeights, params: _Params
    ) -> None:
        rows = len(x)
        given = ordered_columns(x.view(torch.uint8))
        layout = torch.zeros(x_scales.shape[1], -(-rows // 4) * 4)
        layout[:, :rows] = x_scales.T
        params.weights, params.row_scales = weights.tiles.data_ptr(), weights.row_scales.data_ptr()
        params.begins, params.counts = begins.data_ptr(), counts.data_ptr()
        params.tokens, params.experts = rows, weights.tiles.shape[0]
        params.row_blocks, params.k_blocks = weights.tiles.shape[1:3]
        maps = host_map(given, (8, 128), True), host_map(layout[:, :rows], (1, 128), False)
        on_host = compiled(_Variant(weights.gate_up, request.param))
        ended = on_host(ctypes.byref(params), ctypes.byref(maps[0]), ctypes.byref(maps[1]), BLOCKS)
        assert ended, "threads wait for each other for ever"

    return run


def random_experts(counts: list[int], rows: int, columns: int, spread: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales that differ by up to 2^spread, begins and counts."""
    packed = torch.randint(0, 256, (len(counts), rows, columns // 2), dtype=torch.uint8)
    scales = torch.randint(120 - spread, 121, (len(counts), rows, columns // 32), dtype=torch.uint8)
    count = torch.tensor(counts, dtype=torch.int32)
    return packed, scales, (count.cumsum(0) - count).int(), count


@pytest.mark.parametrize(
    ("rows", "columns", "counts", "spread"), [(768, 384, [3, 0, 71, 64, 49], 4), (304, 160, [81, 33], 12)]
)
def test_grouped_product(launch: Launch, rows: int, columns: int, counts: list[int], spread: int):
    """Ragged and empty experts, more tokens than a tile has, scales so far apart that codes are rounded."""
    torch.manual_seed(rows)
    packed, scales, begins, count = random_experts(counts, rows, columns, spread)
    total = sum(counts)
    x, x_scales = quantize(random_matrix(torch.Generator().manual_seed(3), total, columns, 1.0, "cpu"), 1)
    order = torch.randperm(total).int()
    out = torch.full((total, rows), float("nan"), dtype=torch.bfloat16)
    params = _Params(out=out.data_ptr(), out_stride=rows * 2, columns=rows, out_rows=order.data_ptr())
    launch(x, x_scales, begins, count, arrange(packed, scales), params)
    weights = dequantize_fp4_weight(packed, scales, torch.float64)
    for expert, (begin, size) in enumerate(zip(begins.tolist(), counts, strict=True)):
        if size:
            part = slice(begin, begin + size)
            expected = dequantize(x[part], x_scales[part]) @ weights[expert].T
            assert relative_error(out[order[part].long()], expected) < TOLERANCE


@pytest.mark.parametrize(("inner", "columns", "counts"), [(160, 256, [61, 0, 3])])
def test_grouped_gate_and_up(launch: Launch, inner: int, columns: int, counts: list[int]):
    torch.manual_seed(inner)
    packed, scales, begins, count = random_experts(counts, 2 * inner, columns, 4)
    total = sum(counts)
    x, x_scales = quantize(random_matrix(torch.Generator().manual_seed(4), total, columns, 0.5, "cpu") * 0.05, 1)
    gates = torch.rand(total)
    width = -(-inner // 128) * 128
    out = torch.full((total, width), 0x7F, dtype=torch.uint8)  # NaN
    out_scales = torch.full((-(-inner // 128), -(-total // 4) * 4), float("nan"))
    params = _Params(out=out.data_ptr(), out_stride=width, columns=width, limit=7.0, gates=gates.data_ptr())
    params.out_scales, params.out_scales_stride = out_scales.data_ptr(), out_scales.stride(0)
    launch(x, x_scales, begins, count, arrange(packed, scales, True), params)
    out = natural_columns(out, inner)
    weights = dequantize_fp4_weight(packed, scales, torch.float64)
    for expert, (begin, size) in enumerate(zip(begins.tolist(), counts, strict=True)):
        if size:
            part = slice(begin, begin + size)
            product = dequantize(x[part], x_scales[part]) @ weights[expert].T
            z = gates[part, None].double() * swiglu.reference(product, 7.0)
            result = dequantize(out[part].view(E4M3), out_scales.T[part])
            assert relative_error(result, z) < 0.04  # E4M3 of z
            assert ((result - fp8_round_trip(z)).abs() > 1e-3 * z.abs().amax()).double().mean() < 0.02


def test_what_is_broken_stays_in_its_row(launch: Launch):
    """NaN, infinite, huge and tiny scales; tokens and weight rows beside them have the same bits as without."""
    torch.manual_seed(5)
    rows, columns, counts = 256, 128, [20, 30]
    packed, scales, begins, count = random_experts(counts, rows, columns, 3)
    x, x_scales = quantize(torch.randn(50, columns), 1)

    def product(x_scales: Tensor, scales: Tensor) -> Tensor:
        out = torch.full((50, rows), 7.0, dtype=torch.bfloat16)
        params = _Params(out=out.data_ptr(), out_stride=rows * 2, columns=rows)
        launch(x, x_scales, begins, count, arrange(packed, scales), params)
        return out

    whole = product(x_scales, scales)
    broken_scales, broken_rows = x_scales.clone(), scales.clone()
    broken_scales[3], broken_scales[24], broken_scales[49] = torch.nan, torch.inf, 1e-37
    broken_rows[0, 9], broken_rows[1, 255], broken_rows[1, 100] = 255, 240, 3
    out = product(broken_scales, broken_rows)
    assert out[3].isnan().all() and out[:20, 9].isnan().all()
    assert not out[24].isfinite().any() and out[49, :255].abs().max() < 1e-30
    other_rows = torch.tensor([i for i in range(50) if i not in (3, 24, 49)])
    other_columns = torch.tensor([i for i in range(rows) if i not in (9, 100, 255)])
    assert torch.equal(out[other_rows][:, other_columns], whole[other_rows][:, other_columns])
    expected = dequantize(x[20:49], x_scales[20:49]) @ dequantize_fp4_weight(packed, broken_rows, torch.float64)[1].T
    for column in (255, 100):
        assert relative_error(out[20:24, column], expected[:4, column]) < TOLERANCE


def test_weights_beyond_2_to_31_bytes(launch: Launch):
    """As 384 experts of 4,608 x 5,120 are: 4.8 GB. Only the last expert has tokens, so only its memory is touched."""
    torch.manual_seed(6)
    experts, rows, columns, tokens = 1000, 512, 8192, 5
    packed, scales, _, _ = random_experts([tokens], rows, columns, 2)
    one = arrange(packed, scales)
    tiles = torch.empty(experts, *one.tiles.shape[1:], dtype=torch.uint8)
    tiles[-1] = one.tiles[0]
    assert tiles[-1].data_ptr() - tiles.data_ptr() > 2**31
    row_scales = torch.zeros(experts, rows)
    row_scales[-1] = one.row_scales[0]
    begins, count = torch.zeros(experts, dtype=torch.int32), torch.zeros(experts, dtype=torch.int32)
    count[-1] = tokens
    x, x_scales = quantize(torch.randn(tokens, columns), 1)
    out = torch.full((tokens, rows), torch.nan, dtype=torch.bfloat16)
    params = _Params(out=out.data_ptr(), out_stride=rows * 2, columns=rows)
    launch(x, x_scales, begins, count, ExpertWeights(tiles, row_scales, rows, columns, False), params)
    expected = dequantize(x, x_scales) @ dequantize_fp4_weight(packed, scales, torch.float64)[0].T
    assert relative_error(out, expected) < TOLERANCE


def test_counts_past_the_rows(launch: Launch):
    """A count that reaches behind the last row of x writes none there."""
    torch.manual_seed(8)
    packed, scales, begins, count = random_experts([5, 4], 256, 128, 4)
    x, x_scales = quantize(torch.randn(9, 128), 1)
    weights = arrange(packed, scales)
    outs = []
    for tail in (4, 1000):
        out = torch.full((40, 256), 7.0, dtype=torch.bfloat16)
        params = _Params(out=out.data_ptr(), out_stride=512, columns=256)
        launch(x, x_scales, begins, torch.tensor([5, tail], dtype=torch.int32), weights, params)
        outs.append(out)
    assert torch.equal(*outs) and (outs[0][9:] == 7).all() and (outs[0][:9] != 7).any(1).all()
