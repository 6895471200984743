"""The Triton kernels in BF16, without host synchronisation, and at the sizes of V4.1-Flash. Needs a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import deepinfer.kernels.ops  # noqa: F401  (registers the backends)
from deepinfer.kernels.reference.cache_rows import RowFormat
from deepinfer.kernels.reference.quant import quantize_fp4_weight
from deepinfer.kernels.registry import OPERATIONS
from tests.kernels.cases import CASES, EXACT, INF, integers, normal, strided_cache
from tests.kernels.test_ops_backends import copied

pytestmark = pytest.mark.gpu
if torch.cuda.is_available():
    from deepinfer.kernels.cuda.top_k import select_in_levels, select_top_k
CUDA = sorted(name for name, op in OPERATIONS.items() if "cuda" in op.backends)
# Arguments that are at least float32 in a BF16 model.
WIDE = {
    "draw_tokens": {0}, "candidate_blocks": {0}, "moe_gate": {0, 1}, "moe_experts": {2}, "moe_experts_fp4": {2},
    "rope": {1, 2}, "norm_rope": {3, 4}, "norm_latents": {4, 5},
    "hc_post": {2, 3}, "hc_pre": {1, 2, 3, 4}, "hc_post_pre": {2, 3, 4, 5, 6, 7}, "engram_gate": {2},
    "sparse_attention": {5}, "rotated_attention": {1, 2, 7}, "pool_groups": {0, 1}, "reduce_rows": {2},
    "rope_cast": {1, 2}, "uncast_groups": {1},
}  # fmt: skip


def as_bf16(name: str, case: tuple) -> tuple:
    """The case as a BF16 model would give it."""
    wide = WIDE.get(name, set())
    return tuple(
        a.bfloat16() if isinstance(a, Tensor) and a.dtype is torch.float32 and i not in wide else a
        for i, a in enumerate(case)
    )


def as_float(value):
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value


def run(name: str, case) -> tuple:
    result = OPERATIONS[name].backends["cuda"](*(copied(a, "cuda") for a in case))
    results = result if isinstance(result, tuple) else (result,)
    return tuple(r.cpu() if isinstance(r, Tensor) else r for r in results)


def assert_near(result: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest value; the same infinities and NaNs."""
    result, expected = result.double(), expected.double()
    assert result.shape == expected.shape
    finite = expected.isfinite()
    assert torch.equal(result[~finite].nan_to_num(nan=7.0), expected[~finite].nan_to_num(nan=7.0))
    if finite.any():
        error = (result - expected)[finite].abs().max()
        assert error <= tolerance * max(expected[finite].abs().max().item(), 1e-30), float(error)


@pytest.mark.parametrize("name", CUDA)
def test_bf16_is_near_the_float32_reference(name: str):
    if name in EXACT or name == "draw_tokens" or name.endswith("_cast"):
        pytest.skip("exact, and compared in test_ops_backends; codes: below")
    for case in CASES[name](torch.Generator().manual_seed(0)):
        case = as_bf16(name, case)
        wide = [as_float(copied(a)) for a in case]
        if any(isinstance(a, Tensor) and a.is_floating_point() and not a.isfinite().all() for a in wide):
            continue
        if run(name, case)[0] is NotImplemented:
            continue
        expected = OPERATIONS[name].reference(*wide)
        for one, other in zip(run(name, case), expected if isinstance(expected, tuple) else (expected,), strict=True):
            assert_near(one[:, : other.shape[1]] if one.dim() > 1 else one, other, 0.03)


@pytest.mark.parametrize(
    ("name", "first"), [("norm_cast", "rms_norm"), ("swiglu_cast", "swiglu"), ("rope_cast", "rope")]
)
def test_casts_in_bf16_are_those_of_what_is_cast(name: str, first: str):
    """But for codes next to each other, where a sum in another order rounds to another BF16 number."""
    for case in CASES[name](torch.Generator().manual_seed(0)):
        case = as_bf16(name, case)
        (plain,) = run(first, case)
        codes, scales = run(name, case)
        expected_codes, expected_scales = OPERATIONS["cast_groups"].reference(
            plain.flatten(1).float(), "e4m3", "ue8m0", 1, 32
        )
        assert torch.equal(scales, expected_scales)
        differs = (codes.int() - expected_codes.int()).abs()
        assert int(differs.max() if differs.numel() else 0) <= 1 and (differs > 0).float().mean().nan_to_num() < 2e-3


@pytest.mark.parametrize(
    ("values", "scales", "rows", "columns"),
    [("e2m1", "e4m3", 1, 16), ("e2m1", "ue8m0", 1, 32), ("e4m3", "float32", 1, 5120), ("e4m3", "float32", 128, 128),
     ("e4m3", "float32", 1000, 1), ("e2m1", "float32", 1, 128), ("e4m3", "ue8m0", 600, 32)],
)  # fmt: skip
def test_casts_in_bf16_at_full_width(values: str, scales: str, rows: int, columns: int):
    """Codes and scales of the float32 numbers that they are."""
    x = (normal(torch.Generator().manual_seed(columns), 1000, 5120) * 3).bfloat16()
    x[3] *= 100
    result = run("cast_groups", (x, values, scales, rows, columns))
    expected = OPERATIONS["cast_groups"].reference(x.float(), values, scales, rows, columns)
    assert all(torch.equal(one, other) for one, other in zip(result, expected, strict=True))


@pytest.mark.parametrize("name", CUDA)
def test_no_synchronisation(name: str):
    """Compiled and called once, an operation gives the device work and never waits for it."""
    cases = [as_bf16(name, case) for case in CASES[name](torch.Generator().manual_seed(1))][:4]
    for case in cases:
        if name == "top_k" and case[-1] == "raise":
            continue  # an error needs an answer
        inputs = [copied(a, "cuda") for a in case]
        if OPERATIONS[name].backends["cuda"](*inputs) is NotImplemented:
            continue
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            OPERATIONS[name].backends["cuda"](*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("n", "width", "k"), [(3, 131072, 512), (2, 40000, 4096), (1, 1_000_000, 512), (64, 20000, 64)]
)
@pytest.mark.parametrize("kind", ["normal", "tied", "hidden", "constant", "clustered"])
def test_top_k_of_wide_rows(n: int, width: int, k: int, kind: str):
    g = torch.Generator().manual_seed(width)
    scores = normal(g, n, width)
    if kind == "tied":
        scores = scores.mul(8).round()
    elif kind == "hidden":
        scores[:, 700:] = -INF
    elif kind == "constant":
        scores.fill_(1.5)
    elif kind == "clustered":
        scores[:, :20000] += 10
    for dtype in (torch.float32, torch.bfloat16):
        expected = OPERATIONS["top_k_positions"].reference(scores.to(dtype), k)
        on_device = scores.to("cuda", dtype)
        for result in (OPERATIONS["top_k_positions"](on_device, k), select_in_levels(on_device, k)):
            assert torch.equal(result.cpu(), expected)
    own = torch.randint(1, k + 1, (n,), generator=g)  # a number for every row
    result = select_top_k(on_device, k, own.cuda()).cpu()
    for row, count in enumerate(own.tolist()):
        expected = OPERATIONS["top_k_positions"].reference(scores[row : row + 1].to(dtype), count)[0]
        assert torch.equal(result[row][result[row] >= 0], expected[expected >= 0])


@pytest.mark.parametrize("n", [1, 3, 64, 300])
@pytest.mark.parametrize("quantize", [False, True])
def test_experts_at_full_width(n: int, quantize: bool):
    g = torch.Generator().manual_seed(n)
    dim, inner, experts, k = 1024, 512, 32, 6
    (w13, s13), (w2, s2) = (
        quantize_fp4_weight(normal(g, experts * rows, columns) * columns**-0.5)
        for rows, columns in ((2 * inner, dim), (dim, inner))
    )
    stored = [t.view(torch.uint8).unflatten(0, (experts, -1)) for t in (w13, s13, w2, s2)]
    chosen = torch.rand(n, experts, generator=g).argsort(1)[:, :k].int()
    x, gates = normal(g, n, dim).bfloat16(), torch.rand(n, k, generator=g)
    (result,) = run("moe_experts_fp4", (x, chosen, gates, *stored, 10.0, quantize))
    expected = OPERATIONS["moe_experts_fp4"].reference(x.float(), chosen, gates, *stored, 10.0, quantize)
    assert (result - expected).norm() <= 0.01 * expected.norm()
    for row in (0, n // 2):  # the same bits as alone
        one = slice(row, row + 1)
        (alone,) = run("moe_experts_fp4", (x[one], chosen[one], gates[one], *stored, 10.0, quantize))
        assert torch.equal(alone[0], result[row])


@pytest.mark.parametrize("n", [1, 64])
def test_attention_at_full_width(n: int):
    g = torch.Generator().manual_seed(n)
    heads, dim = 64, 512
    window = strided_cache(g, 4, 134, dim, "packed", RowFormat.FP8)
    latents = strided_cache(g, 20, 128, dim, "packed", RowFormat.NVFP4)
    slots = integers(g, -1, 4 * 134, n, 128), integers(g, -1, 2560, n, 512)
    q, sink = normal(g, n, heads, dim).bfloat16(), normal(g, heads)
    case = q, window, slots[0], latents, slots[1], sink, dim**-0.5
    (result,) = run("sparse_attention", case)
    expected = OPERATIONS["sparse_attention"].reference(q.float(), *case[1:])
    assert_near(result, expected, 0.02)


def test_index_scores_at_full_width():
    g = torch.Generator().manual_seed(5)
    cache = strided_cache(g, 64, 128, 128, "packed", RowFormat.MXFP4)
    tables = torch.stack([torch.randperm(64, generator=g)[:40] for _ in range(9)]).int()
    visible = torch.randint(0, 40 * 128 + 1, (9,), generator=g).int()
    visible[0], visible[1] = 0, 40 * 128
    case = normal(g, 9, 32, 128).bfloat16(), normal(g, 9, 32).bfloat16(), cache, tables, torch.arange(9).int(), visible
    (result,) = run("index_scores", case)
    expected = OPERATIONS["index_scores"].reference(case[0].float(), case[1].float(), *case[2:])
    assert_near(result, expected, 0.01)
