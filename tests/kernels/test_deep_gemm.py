"""Matrix products for Hopper agree with float64 over what their operands hold; most need the GPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm import moe_gemm
from deepinfer.kernels.deep_gemm.activations import quantize_rows, row_scaled_weight
from deepinfer.kernels.deep_gemm.fp4_weights import ExpertWeights, arrange, natural_columns, ordered_columns
from deepinfer.kernels.deep_gemm.fp8_gemm import fp8_gemm, row_scales_layout
from deepinfer.kernels.deep_gemm.fp8_variants import SHARED_BYTES, TILES, choose_tile
from deepinfer.kernels.deep_gemm.moe import routed_experts
from deepinfer.kernels.deep_gemm.moe_gemm import grouped_gate_up, grouped_gemm
from deepinfer.kernels.deep_jit.tensor_map import tensor_map
from deepinfer.kernels.reference.basic import swiglu
from deepinfer.kernels.reference.moe import moe_experts_fp4
from deepinfer.kernels.reference.quant import (
    dequantize_fp4_weight,
    dequantize_fp8_weight,
    fp8_round_trip,
    pack_fp8_row,
    quantize_fp8_weight,
)
from tests.kernels.matrix_cases import (
    E4M3,
    TOLERANCE,
    dequantize,
    gpu,
    hopper,
    quantize,
    random_matrix,
    ranges,
    relative_error,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


# ------------------------------------------------------------------ dense


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_fit_the_copy_engine_and_shared_memory(tile):
    parts = (tile.m // (1 + (tile.share == "a")), tile.n // (1 + (tile.share == "b")))
    assert all(part <= 256 and part % 8 == 0 for part in parts)
    assert tile.stages >= 3
    assert tile.k_parts == 1 or (tile.k_parts <= 8 and tile.share == "")
    assert tile.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("m", [1, 16, 64, 128, 500, 4096, 100_000])
@pytest.mark.parametrize("n", [8, 512, 5120, 32768])
def test_every_shape_has_a_tile(m, n):
    assert choose_tile(m, n, 5120, 132) in TILES


def test_scales_are_laid_out_by_column():
    scales = torch.randn(5, 3)
    laid_out = row_scales_layout(scales)
    assert torch.equal(laid_out, scales)
    assert laid_out.stride() == (1, 8)
    assert row_scales_layout(laid_out) is laid_out


@pytest.mark.parametrize(
    "matrix, message",
    [
        (torch.zeros(4, 4, 4), "needs 3 sizes"),
        (torch.zeros(64, 64).T[:, :5], "contiguous"),
        (torch.zeros(4, 6), "16 bytes"),
        (torch.zeros(64).view(4, 16)[:, 1:5], "16 bytes"),
    ],
)
def test_matrices_that_the_copy_engine_does_not_take(matrix, message):
    with pytest.raises(ValueError, match=message):
        tensor_map(matrix, (4, 4), 0)


@gpu
@hopper
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 128), (300, 520, 1008), (77, 1288, 2304), (129, 5120, 128)])
def test_dense_product(tile, shape):
    m, n, k = shape
    g = torch.Generator().manual_seed(m + n + k)
    a, a_scales = quantize(random_matrix(g, m, k, 2.0), 1)
    b, b_scales = quantize(random_matrix(g, n, k, 1.0), 128)
    wide = torch.full((m, n + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
    out = fp8_gemm(a, a_scales, b, b_scales, wide[:, :n], tile=tile)
    expected = dequantize(a, a_scales) @ dequantize(b, b_scales, 128).T
    assert relative_error(out, expected) < TOLERANCE
    assert wide[:, n:].isnan().all()
    again = fp8_gemm(a, a_scales, b, b_scales, tile=tile)
    assert torch.equal(again, out)


@gpu
@hopper
@pytest.mark.parametrize(
    "shape", [(4096, 1280, 5120), (128, 5120, 5120), (64, 512, 5120), (5, 4608, 5120), (200, 5120, 2304)]
)
def test_dense_product_with_a_scale_a_row_of_b(shape):
    """V4.1-Flash's FP8 linears: activations rounded for 32 values, weights in 32 x 32 blocks."""
    m, n, k = shape
    g = torch.Generator().manual_seed(m)
    x = random_matrix(g, m, k, 1.0).bfloat16()
    values, scale_bytes = quantize_fp8_weight(random_matrix(g, n, k, 0.5))
    result = fp8_gemm(*quantize_rows(x), *row_scaled_weight(values, scale_bytes, 32))
    expected = fp8_round_trip(x.double()) @ dequantize_fp8_weight(values, scale_bytes, torch.float64).T
    assert relative_error(result, expected) < TOLERANCE


@gpu
@hopper
def test_dense_product_of_strided_rows_and_of_nothing():
    g = torch.Generator().manual_seed(0)
    a, a_scales = quantize(random_matrix(g, 50, 256, 1.0), 1)
    b, b_scales = quantize(random_matrix(g, 128, 256, 1.0), 128)
    wide = torch.zeros(50, 512, device="cuda").to(E4M3)
    wide[:, 128:384] = a
    assert torch.equal(fp8_gemm(wide[:, 128:384], a_scales, b, b_scales), fp8_gemm(a, a_scales, b, b_scales))
    assert fp8_gemm(a[:0], a_scales[:0], b, b_scales).shape == (0, 128)


@gpu
@hopper
def test_dense_product_of_extreme_scales():
    a = torch.full((64, 256), 448.0, device="cuda").to(E4M3)
    b = torch.full((128, 256), -448.0, device="cuda").to(E4M3)
    ones = torch.ones(1, 2, device="cuda")
    result = fp8_gemm(a, (ones * 1e-20).expand(64, 2).contiguous(), b, ones * 1e20)
    assert torch.allclose(
        result.double(), torch.tensor(-448.0 * 448 * 256, dtype=torch.float64, device="cuda"), rtol=4e-3
    )
    huge = fp8_gemm(a, torch.full((64, 2), 1e30, device="cuda"), b, ones * 1e30)
    assert torch.equal(huge, torch.full_like(huge, float("-inf")))
    nan = torch.ones(64, 2, device="cuda")
    nan[3, 1] = float("nan")
    result = fp8_gemm(a, nan, b, ones)
    assert result[3].isnan().all()
    assert result[:3].isfinite().all() and result[4:].isfinite().all()


def test_a_weight_of_blocks_becomes_one_of_rows():
    g = torch.Generator().manual_seed(1)
    blocks = torch.exp(2 * torch.randn(3, 5, generator=g)).repeat_interleave(32, 0).repeat_interleave(32, 1)
    values, scale_bytes = quantize_fp8_weight((torch.randn(96, 160, generator=g) * blocks)[:90])
    rows, scales = row_scaled_weight(values, scale_bytes, 32)
    expected = dequantize_fp8_weight(values, scale_bytes, torch.float64)
    difference = (rows.double() * scales.double()[:, None] - expected).abs()
    assert (difference <= scales.double()[:, None] * 2.0**-10).all()  # half a step of the smallest E4M3 values


# ------------------------------------------------------------------ activations


@gpu
@hopper
@pytest.mark.parametrize("shape", [(1, 32), (777, 1312), (64, 5120)])
def test_activations_are_rounded_for_32_values(shape):
    g = torch.Generator().manual_seed(shape[0])
    x = (random_matrix(g, *shape, 1.0)).bfloat16()
    x[0, :32] = 0
    values, scales = quantize_rows(x)
    assert relative_error(dequantize(values, scales), fp8_round_trip(x.double())) < 1e-4
    rows = torch.randint(0, shape[0], (100,), dtype=torch.int32, device="cuda")
    picked, picked_scales = quantize_rows(x, rows=rows)
    ordered, ordered_scales = quantize_rows(x, rows=rows, ordered=True)
    assert torch.equal(ordered.view(torch.uint8), ordered_columns(picked).view(torch.uint8))
    assert torch.equal(ordered_scales, picked_scales)
    assert torch.equal(picked.view(torch.uint8), values.view(torch.uint8)[rows.long()])
    assert torch.equal(picked_scales, scales[rows.long()])
    packed = pack_fp8_row(x.float())
    stored = packed[:, : shape[1]].contiguous().view(E4M3)
    again, again_scales = quantize_rows(stored, packed[:, shape[1] :])
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(again_scales, scales)


# ------------------------------------------------------------------ grouped


def random_experts(experts: int, rows: int, columns: int, spread: int, device: str) -> tuple[Tensor, Tensor]:
    packed = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8)
    scales = torch.randint(120, 120 + spread, (experts, rows, columns // 32), dtype=torch.uint8)
    return packed.to(device), scales.to(device)


def widened(weights: ExpertWeights) -> Tensor:
    """What the kernel makes of the arranged codes, step by step as fp4_weights.cuh describes it; float64 [E, O, K]."""
    experts, row_blocks, k_blocks, _ = weights.tiles.shape
    words = weights.tiles[..., :16384].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    words = words.view(experts, row_blocks, k_blocks, 4, 4, 2, 8, 4, 4)  # q, warp, half, row, lane, product
    steps = weights.tiles[..., 16384:].long().view(experts, row_blocks, k_blocks, 4, 4, 2, 8, 4, 1)
    exponent = torch.where(steps < 128, steps - 5, -6 - (steps & 7)).double()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    out = torch.zeros(experts, row_blocks, 4, 4, 2, 8, k_blocks, 4, 4, 2, 4, dtype=torch.float64)
    for upper in range(2):
        for i in range(4):
            value = magnitudes[words >> (16 * upper + 4 * i) & 7] * torch.exp2(exponent)
            value = value.to(E4M3).double()  # exact, or rounded among the smallest E4M3 values
            sign = 1 - 2 * (words >> (8 * i + 7 - 4 * upper) & 1)
            signed = (value * sign).permute(0, 1, 3, 4, 5, 6, 2, 7, 8)  # E, block, q, warp, half, row, k block, lane, s
            out[..., upper, i] = signed
    matrix = out.reshape(experts, row_blocks * 256, k_blocks * 128) * weights.row_scales.double().unsqueeze(-1)
    assert (matrix[:, weights.rows :] == 0).all()
    assert (matrix[:, :, weights.columns :] == 0).all()
    return matrix[:, : weights.rows, : weights.columns]


@pytest.mark.parametrize("rows, columns", [(256, 128), (300, 160), (16, 32)])
def test_arranged_weights_hold_the_same_values(rows, columns):
    torch.manual_seed(rows)
    packed, scales = random_experts(2, rows, columns, 12, "cpu")
    assert torch.equal(widened(arrange(packed, scales)), dequantize_fp4_weight(packed, scales, torch.float64))


def test_arranged_weights_round_only_far_below_a_rows_largest():
    torch.manual_seed(0)
    packed, scales = random_experts(1, 256, 512, 100, "cpu")
    expected = dequantize_fp4_weight(packed, scales, torch.float64)
    difference = (widened(arrange(packed, scales)) - expected).abs()
    assert (difference <= expected.abs().amax(-1, keepdim=True) * 2.0**-16).all()
    assert (difference > 0).any()


@pytest.mark.parametrize("columns", [32, 128, 300])
def test_ordered_columns_come_back(columns):
    x = torch.randint(0, 256, (5, columns), dtype=torch.uint8)
    ordered = ordered_columns(x)
    assert ordered.shape == (5, -(-columns // 128) * 128) and torch.equal(natural_columns(ordered, columns), x)
    at = ordered_columns(torch.arange(128, dtype=torch.uint8).view(1, -1))[0].view(4, 2, 4, 4)  # s, u, c, i
    for s, u, c, i in product(range(4), range(2), range(4), range(4)):
        assert at[s, u, c, i] == 32 * c + 8 * s + 4 * u + i


def test_gate_and_up_take_turns_of_eight_rows():
    torch.manual_seed(0)
    packed, scales = random_experts(2, 96, 64, 4, "cpu")
    order = torch.arange(96).view(2, 6, 8).transpose(0, 1).flatten()
    expected = dequantize_fp4_weight(packed, scales, torch.float64)[:, order]
    assert torch.equal(widened(arrange(packed, scales, gate_up=True)), expected)


def test_arranged_weights_are_no_larger_than_stored_ones():
    packed, scales = random_experts(2, 512, 256, 4, "cpu")
    assert arrange(packed, scales).tiles.numel() == packed.numel() + scales.numel()


@pytest.mark.parametrize(
    "gate_up, rows, columns, message", [(True, 24, 64, "multiple of 8"), (False, 16, 48, "K % 32")]
)
def test_weights_that_cannot_be_arranged(gate_up, rows, columns, message):
    packed = torch.zeros(1, rows, columns // 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        arrange(packed, torch.zeros(1, rows, columns // 32, dtype=torch.uint8), gate_up)


GROUPS = [
    # rows, columns, counts
    (256, 128, [16, 0, 5]),
    (512, 256, [1, 130, 64, 33]),
    (600, 480, [96, 97, 200, 0, 3]),
    (5120, 2304, [70, 50]),
    (256, 5120, [0, 0, 0, 20]),
    (256, 128, [0, 0]),
]


@pytest.fixture(params=[0, 1 << 20], ids=["many", "few"])
def each_kernel(request, monkeypatch):
    """The kernel for many tokens an expert and the one for few, whatever the tokens."""
    monkeypatch.setattr(moe_gemm, "FEW_TOKENS", request.param)


@gpu
@hopper
@pytest.mark.parametrize("room", [None, 210])
@pytest.mark.parametrize("rows, columns, counts", GROUPS)
def test_grouped_product(rows, columns, counts, room, each_kernel):
    torch.manual_seed(rows + columns)
    packed, scales = random_experts(len(counts), rows, columns, 6, "cuda")
    begins, count, total = ranges(counts, room)
    g = torch.Generator().manual_seed(3)
    x, x_scales = quantize(random_matrix(g, max(total, 1), columns, 1.0)[:total], 1)
    out = torch.full((total, rows), float("nan"), dtype=torch.bfloat16, device="cuda")
    given = ordered_columns(x)
    grouped_gemm(given, x_scales, begins, count, arrange(packed, scales), out)
    weights = dequantize_fp4_weight(packed, scales, torch.float64)
    written = torch.zeros(total, dtype=torch.bool, device="cuda")
    for expert, (begin, size) in enumerate(zip(begins.tolist(), counts, strict=True)):
        part = slice(begin, begin + size)
        written[part] = True
        if size:
            expected = dequantize(x[part], x_scales[part]) @ weights[expert].T
            assert relative_error(out[part], expected) < TOLERANCE
    assert out[~written].isnan().all()
    if total:
        order = torch.randperm(total, device="cuda").int()
        scattered = torch.full_like(out, float("nan"))
        grouped_gemm(given, x_scales, begins, count, arrange(packed, scales), scattered, order)
        assert torch.equal(scattered[order.long()][written], out[written])


@gpu
@hopper
@pytest.mark.parametrize("rows", [1, 130])
def test_dense_product_with_fp4_weights(rows):
    """Without tables there is one expert, with all rows."""
    torch.manual_seed(rows)
    packed, scales = random_experts(1, 600, 480, 6, "cuda")
    x, x_scales = quantize(random_matrix(torch.Generator().manual_seed(rows), rows, 480, 1.0), 1)
    out = grouped_gemm(ordered_columns(x), x_scales, None, None, arrange(packed, scales))
    expected = dequantize(x, x_scales) @ dequantize_fp4_weight(packed, scales, torch.float64)[0].T
    assert relative_error(out, expected) < TOLERANCE


@gpu
@hopper
@pytest.mark.parametrize(
    "inner, columns, counts", [(128, 128, [16, 0, 5]), (288, 480, [96, 97, 200, 0, 3]), (2304, 5120, [70, 50])]
)
def test_grouped_gate_and_up(inner, columns, counts, each_kernel):
    torch.manual_seed(inner)
    packed, scales = random_experts(len(counts), 2 * inner, columns, 4, "cuda")
    begins, count, total = ranges(counts)
    g = torch.Generator().manual_seed(4)
    x, x_scales = quantize(random_matrix(g, total, columns, 0.5) * 0.05, 1)
    gates = torch.rand(total, generator=g).cuda()
    arranged = arrange(packed, scales, True)
    values, value_scales = grouped_gate_up(ordered_columns(x), x_scales, begins, count, arranged, gates, 7.0)
    values = natural_columns(values, inner)
    weights = dequantize_fp4_weight(packed, scales, torch.float64)
    for expert, (begin, size) in enumerate(zip(begins.tolist(), counts, strict=True)):
        part = slice(begin, begin + size)
        if size:
            product = dequantize(x[part], x_scales[part]) @ weights[expert].T
            z = gates[part, None].double() * swiglu.reference(product, 7.0)
            result = dequantize(values[part], value_scales[part])
            assert relative_error(result, z) < 0.04  # E4M3 of z
            # A value on the other side of a rounding boundary differs by a step; few do.
            assert ((result - fp8_round_trip(z)).abs() > 1e-3 * z.abs().amax()).double().mean() < 0.02


@gpu
@hopper
@pytest.mark.parametrize("tokens, experts, slots", [(1, 8, 2), (64, 16, 6), (500, 24, 3)])
def test_routed_experts_agree_with_the_reference(tokens, experts, slots, each_kernel):
    torch.manual_seed(tokens)
    dim, inner = 256, 160
    w13, s13 = random_experts(experts, 2 * inner, dim, 3, "cuda")
    w2, s2 = random_experts(experts, dim, inner, 3, "cuda")
    x = torch.randn(tokens, dim, device="cuda").bfloat16() * 0.1
    chosen = torch.rand(tokens, experts, device="cuda").topk(slots).indices.int()
    gates = torch.rand(tokens, slots, device="cuda")
    weights = arrange(w13, s13, gate_up=True), arrange(w2, s2)
    result = routed_experts(x, chosen, gates, *weights, 7.0)
    expected = moe_experts_fp4.reference(x.double(), chosen, gates.double(), w13, s13, w2, s2, 7.0, True)
    assert relative_error(result, expected) < 0.01
    assert torch.equal(routed_experts(x, chosen, gates, *weights, 7.0), result)
    other = torch.randn(tokens, dim, device="cuda").bfloat16()
    both = routed_experts(x, chosen, gates, *weights, 7.0, other)
    assert both.dtype == torch.bfloat16 and relative_error(both, (result + other).double()) < TOLERANCE
    one = routed_experts(x[:1], chosen[:1], gates[:1], *weights, 7.0)
    assert torch.equal(one, result[:1])  # whatever else is in the batch


@gpu
@hopper
def test_experts_of_strided_rows(each_kernel):
    torch.manual_seed(10)
    begins, count, total = ranges([20, 30])
    packed, scales = random_experts(2, 512, 256, 4, "cuda")
    weights = arrange(packed, scales)
    x, x_scales = quantize(torch.randn(total, 256, device="cuda"), 1)
    wide = torch.zeros(total, 512, device="cuda").to(E4M3)
    x = wide[:, 128:384] = ordered_columns(x)
    out = torch.full((total, 520), float("nan"), dtype=torch.bfloat16, device="cuda")
    grouped_gemm(wide[:, 128:384], x_scales, begins, count, weights, out[:, :512])
    assert torch.equal(out[:, :512], grouped_gemm(x, x_scales, begins, count, weights))
    assert out[:, 512:].isnan().all()


@gpu
@hopper
def test_broken_rows_of_experts(each_kernel):
    """NaN, infinite and tiny rows of x, NaN and huge rows of weights: what is beside them keeps its bits."""
    torch.manual_seed(11)
    counts = [20, 30]
    begins, count, total = ranges(counts)
    packed, scales = random_experts(2, 512, 256, 4, "cuda")
    x, x_scales = quantize(torch.randn(total, 256, device="cuda"), 1)
    x = ordered_columns(x)
    whole = grouped_gemm(x, x_scales, begins, count, arrange(packed, scales))
    scales[0, 9], scales[1, 255] = 255, 240
    x_scales[3], x_scales[24], x_scales[49] = torch.nan, torch.inf, 1e-37
    out = grouped_gemm(x, x_scales, begins, count, arrange(packed, scales))
    assert out[3].isnan().all() and out[:20, 9].isnan().all() and not out[24].isfinite().any()
    assert out[49, :255].abs().max() < 1e-30
    rows, columns = torch.ones(total, dtype=torch.bool), torch.ones(512, dtype=torch.bool)
    rows[[3, 24, 49]], columns[[9, 255]] = False, False
    assert torch.equal(out[rows][:, columns], whole[rows][:, columns])
