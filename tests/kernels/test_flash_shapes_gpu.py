"""What V4.1-Flash launches, at its sizes: products, experts, indexer scores and mHC, beside float64 references."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels import ops
from deepinfer.kernels.deep_gemm import moe_gemm
from deepinfer.kernels.deep_gemm.activations import quantize_rows, row_scaled_weight
from deepinfer.kernels.deep_gemm.fp4_weights import ExpertWeights, arrange, ordered_columns
from deepinfer.kernels.deep_gemm.indexer import index_scores
from deepinfer.kernels.deep_gemm.linear import fp8_product
from deepinfer.kernels.deep_gemm.moe import routed_experts
from deepinfer.kernels.deep_gemm.moe_gemm import grouped_gemm
from deepinfer.kernels.reference.hyper_connection import hc_post_pre
from deepinfer.kernels.reference.indexer import index_scores as reference_scores
from deepinfer.kernels.reference.moe import moe_experts_fp4
from deepinfer.kernels.reference.quant import (
    dequantize_fp4_weight,
    dequantize_fp8_weight,
    fp8_round_trip,
    mxfp4_round_trip,
    pack_mxfp4_row,
    quantize_fp8_weight,
)
from tests.kernels.cases import hc_mix, normal
from tests.kernels.matrix_cases import TOLERANCE, dequantize, gpu, hopper, relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DIM, INNER, ACTIVE = 5120, 2304, 6
LINEARS = {  # rows, columns of the weight
    "wq_a and wkv": (1792, DIM),
    "wq_b": (32768, 1280),
    "wo_b": (DIM, 8192),
    "shared w1 and w3": (2 * INNER, DIM),
    "shared w2": (DIM, INNER),
    "indexer wq_b": (4096, 1280),
    "Engram wkv": (25600, 6144),
}


@gpu
@hopper
@pytest.mark.parametrize("rows", [1, 64, 130])
@pytest.mark.parametrize("name", LINEARS)
def test_fp8_linears(name, rows):
    n, k = LINEARS[name]
    g = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, k, device="cuda", generator=g).bfloat16()
    weight = quantize_fp8_weight(torch.randn(n, k, device="cuda", generator=g))
    result = fp8_product(*quantize_rows(x), *row_scaled_weight(*weight, 32))
    expected = fp8_round_trip(x.double()) @ dequantize_fp8_weight(*weight, torch.float64).T
    assert relative_error(result, expected) < TOLERANCE


@gpu
@hopper
@pytest.mark.parametrize("tokens", [1, 64, 500])
def test_routed_experts(tokens):
    experts = 16
    g = torch.Generator("cuda").manual_seed(tokens)
    stored = []
    for rows, columns in ((2 * INNER, DIM), (DIM, INNER)):
        stored.append(
            torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device="cuda", generator=g)
        )
        scales = torch.randint(117, 121, (experts, rows, columns // 32), device="cuda", generator=g)
        stored.append(scales.to(torch.uint8))
    x = torch.randn(tokens, DIM, device="cuda", generator=g).bfloat16()
    chosen = torch.rand(tokens, experts, device="cuda", generator=g).topk(ACTIVE).indices.int()
    gates = torch.rand(tokens, ACTIVE, device="cuda", generator=g)
    arranged = arrange(stored[0], stored[1], gate_up=True), arrange(stored[2], stored[3])
    result = routed_experts(x, chosen, gates, *arranged, 10.0)
    expected = moe_experts_fp4.reference(x.double(), chosen, gates.double(), *stored, 10.0, True)
    assert relative_error(result, expected) < 0.01  # E4M3 between the products


@gpu
@hopper
@pytest.mark.parametrize("few_tokens", [0, 1 << 20], ids=["many", "few"])
@pytest.mark.parametrize("rows, columns", [(DIM, INNER), (2 * INNER, DIM)])
def test_the_last_of_384_experts(rows, columns, few_tokens, monkeypatch):
    """Weights of 2.4 and 4.8 GB: the last expert's lie beyond 2^31 bytes."""
    monkeypatch.setattr(moe_gemm, "FEW_TOKENS", few_tokens)
    g = torch.Generator("cuda").manual_seed(rows)
    experts, tokens = 384, 70
    packed = torch.randint(0, 256, (2, rows, columns // 2), dtype=torch.uint8, device="cuda", generator=g)
    scales = torch.randint(117, 121, (2, rows, columns // 32), device="cuda", generator=g).to(torch.uint8)
    two = arrange(packed, scales)
    tiles = torch.empty(experts, *two.tiles.shape[1:], dtype=torch.uint8, device="cuda")
    row_scales = torch.full((experts, two.row_scales.shape[1]), float("nan"), device="cuda")
    tiles[:: experts - 1], row_scales[:: experts - 1] = two.tiles, two.row_scales
    weights = ExpertWeights(tiles, row_scales, rows, columns, gate_up=False)
    counts = torch.zeros(experts, dtype=torch.int32, device="cuda")
    counts[:: experts - 1] = tokens
    x, x_scales = quantize_rows(torch.randn(2 * tokens, columns, device="cuda", generator=g).bfloat16())
    out = grouped_gemm(ordered_columns(x), x_scales, (counts.cumsum(0) - counts).int(), counts, weights)
    wide = dequantize(x, x_scales).unflatten(0, (2, tokens))
    expected = wide @ dequantize_fp4_weight(packed, scales, torch.float64).transpose(1, 2)
    assert relative_error(out, expected.flatten(0, 1)) < TOLERANCE


@gpu
@hopper
@pytest.mark.parametrize("rows, sequences", [(8, 8), (130, 2)])
def test_indexer_scores_of_32k_keys(rows, sequences):
    """32 heads of 128 over MXFP4 keys in pages of 128 entries: decode, and prefill."""
    blocks = 256
    g = torch.Generator("cuda").manual_seed(rows)
    iq = mxfp4_round_trip(torch.randn(rows, 32, 128, device="cuda", generator=g)).bfloat16()
    weights = torch.randn(rows, 32, device="cuda", generator=g).bfloat16()
    cache = pack_mxfp4_row(torch.randn(sequences * blocks * 128, 128, device="cuda", generator=g)).view(-1, 128, 68)
    tables = torch.randperm(len(cache), device="cuda", generator=g).view(sequences, blocks).int()
    owner = torch.arange(rows, device="cuda", dtype=torch.int32) * sequences // rows
    visible = torch.randint(20_000, blocks * 128 + 1, (rows,), device="cuda", dtype=torch.int32, generator=g)
    result = index_scores(iq, weights, cache, tables, owner, visible)
    expected = reference_scores.reference(iq.double(), weights.double(), cache, tables, owner, visible)
    width = expected.shape[1]
    assert (result[:, width:] == float("-inf")).all()
    assert torch.equal(result[:, :width].isinf(), expected.isinf())
    assert relative_error(result[:, :width][~expected.isinf()], expected[~expected.isinf()]) < 1e-3


@gpu
@hopper
@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_hyper_connections(tokens):
    """Post-mix of one sub-layer and pre-mix of the next: four streams of 5,120."""
    g = torch.Generator().manual_seed(tokens)
    p_prev, fn, scale, base, norm_weight, *constants = hc_mix(g, tokens, 4, DIM)
    comb = torch.rand(tokens, 4, 4, generator=g)
    streams = normal(g, tokens, 4, DIM).bfloat16(), normal(g, tokens, DIM).bfloat16()
    rest = normal(g, tokens, 4), comb, p_prev, fn, scale, base, norm_weight.bfloat16()
    given = [t.cuda() for t in (*streams, *rest)]
    results = ops.hc_post_pre(*given, *constants)
    expected = hc_post_pre.reference(*(t.double() for t in given), *constants)
    for result, wide in zip(results, expected, strict=True):
        assert relative_error(result, wide) < 6e-3  # BF16 streams between the two
