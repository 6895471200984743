"""The CUDA C++ casts and the gather of rows compiled for the CPU, bit for bit against the reference: no GPU needed."""

from __future__ import annotations

import ctypes

import pytest
import torch

from deepinfer.kernels.reference.basic import rms_norm, rope, swiglu
from deepinfer.kernels.reference.cache_rows import RowFormat, load_rows
from deepinfer.kernels.reference.casts import cast_groups
from deepinfer.kernels.tile_kernels import casts, gather_rows
from tests.kernels.cases import INF, NAN, normal
from tests.kernels.test_deep_select_on_host import COMPILER, compiled  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def hard_rows(n: int, width: int) -> torch.Tensor:
    """BF16 rows of many sizes, with ties between codes, zeros, NaN and infinities; part of a wider tensor."""
    g = torch.Generator().manual_seed(width + n)
    x = normal(g, n, width + 24) * torch.exp2(torch.randint(-30, 30, (n, 1), generator=g).float())
    x[::3] = torch.randint(-255, 256, (len(x[::3]), width + 24), generator=g).float()  # quotients halfway between codes
    if n > 5:
        x[1], x[2, 5], x[4, width // 2], x[5, 40] = 0, INF, NAN, -INF
    return x.bfloat16()[:, 8 : 8 + width]


def outputs(n: int, width: int, scales: tuple[int, int], ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    kind = torch.uint8 if ue8m0 else torch.float32
    return torch.full((n, width), 0x55, dtype=torch.uint8), torch.full(scales, 77, dtype=kind)


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize(
    ("n", "width", "height", "columns"),
    [(7, 512, 1, 128), (9, 256, 1, 256), (7, 1152, 1, 1152), (3, 1408, 1, 704), (200, 256, 128, 128), (70, 128, 64, 64),
     (300, 64, 300, 1), (700, 32, 700, 1), (2100, 64, 2100, 1), (150, 64, 70, 1), (150, 256, 70, 1)],
)  # fmt: skip
def test_casts(compiled, n: int, width: int, height: int, columns: int, ue8m0: bool):  # noqa: F811
    x = hard_rows(n, width)
    groups = -(-n // height)
    codes, scales = outputs(n, width, (groups, width // columns), ue8m0)
    if height == 1:
        build, strip = casts.lines_build(width, columns, ue8m0), columns
    else:
        strip = casts.strip_of(height, columns, width)
        build = casts.tiles_build(strip, height, columns, ue8m0)
    tiles = groups * (width // strip)
    cluster = build.defines["CLUSTER"]
    ranks, clusters = cluster, tiles
    if height == 1:
        ranks, clusters = -(-tiles * build.defines["LANES"] // build.defines["THREADS"]), 1
    on_host = compiled(build, "CastParams")
    on_host(ctypes.byref(casts.cast_parameters(x, codes, scales, height)), ranks, clusters, casts.SHARED_BYTES)
    expected = cast_groups.reference(x.float(), "e4m3", "ue8m0" if ue8m0 else "float32", height, columns)
    assert torch.equal(scales.nan_to_num(-1) if not ue8m0 else scales, expected[1].nan_to_num(-1))
    assert torch.equal(codes, expected[0])


def assert_cast_of(plain: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """But for codes and scales next to each other: a sum in another order may round to another BF16 number."""
    expected = cast_groups.reference(plain.flatten(1).float(), "e4m3", "ue8m0", 1, 32)
    same = scales == expected[1]
    assert same.float().mean() > 0.999
    differs = (codes.int() - expected[0].int()).abs().unflatten(1, (-1, 32))[same]
    assert int(differs.max()) <= 1 and float((differs > 0).float().mean()) < 2e-3


@pytest.mark.parametrize(("n", "width"), [(7, 1152), (3, 64), (6, 5120)])
def test_norm(compiled, n: int, width: int):  # noqa: F811
    x, weight = hard_rows(n, width), normal(torch.Generator().manual_seed(1), width).bfloat16()
    out = outputs(n, width, (n, width // 32), True)
    on_host = compiled(casts.norm_build(width), "FusedParams")
    on_host(ctypes.byref(casts.fused_parameters(x, (weight, None, None), out, 1e-6)), n, 1, casts.SHARED_BYTES)
    assert_cast_of(rms_norm.reference(x, weight, 1e-6), *out)


@pytest.mark.parametrize(("n", "width"), [(7, 1152), (3, 64), (40, 96)])
def test_swiglu(compiled, n: int, width: int):  # noqa: F811
    x = hard_rows(n, 2 * width)
    out = outputs(n, width, (n, width // 32), True)
    on_host = compiled(casts.swiglu_build(width), "FusedParams")
    blocks = -(-n * width // 8 // (2 * casts.SWIGLU_THREADS))
    on_host(ctypes.byref(casts.fused_parameters(x, (None, None, None), out, 10.0)), blocks, 1, casts.SHARED_BYTES)
    assert_cast_of(swiglu.reference(x, 10.0), *out)


@pytest.mark.parametrize(("n", "heads", "dim", "pairs"), [(7, 3, 96, 8), (3, 8, 512, 32), (5, 1, 64, 32)])
@pytest.mark.parametrize("inverse", [False, True])
def test_rope(compiled, n: int, heads: int, dim: int, pairs: int, inverse: bool):  # noqa: F811
    g = torch.Generator().manual_seed(dim)
    x = hard_rows(n, heads * dim + 64)[:, : heads * dim].unflatten(1, (heads, dim))
    angles = normal(g, n, pairs)
    cos, sin = angles.cos(), angles.sin()
    out = outputs(n, heads * dim, (n, heads * dim // 32), True)
    on_host = compiled(casts.rope_build(heads, dim, pairs), "FusedParams")
    arguments = casts.fused_parameters(x, (None, cos, sin), out, -1.0 if inverse else 1.0)
    on_host(ctypes.byref(arguments), -(-n * heads * dim // 8 // (4 * casts.THREADS)), 1, casts.SHARED_BYTES)
    assert_cast_of(rope.reference(x, cos, sin, inverse), *out)


def test_a_quotient_is_that_of_a_division():
    """All pairs of BF16 significands: a product with the rounded inverse and one step with the remainder."""
    significand = torch.arange(128, 256).float()
    scale = (significand / 448).unsqueeze(1)
    x = torch.cat([significand * 2.0**e for e in range(-10, 1)])
    inverse = 1 / scale
    near = x * inverse
    rest = (x.double() - near.double() * scale.double()).float()
    assert torch.equal((near.double() + rest.double() * inverse.double()).float(), x / scale)


def test_gathered_rows(compiled):  # noqa: F811
    """All codes and all scales, in pages with room between the rows."""
    g = torch.Generator().manual_seed(0)
    table = torch.randint(0, 256, (3, 20, 280), dtype=torch.uint8, generator=g)[:, :16, 8:272]
    slots = torch.randint(-1, 48, (70,), generator=g)
    out = torch.full((70, gather_rows.DIM), torch.nan, dtype=torch.bfloat16)
    blocks = -(-70 // (gather_rows.ROWS * gather_rows.WARPS))
    on_host = compiled(gather_rows.build(), "GatherParams")
    on_host(ctypes.byref(gather_rows.parameters(table, slots, out)), blocks, 1, 16)
    expected = load_rows.reference(table, slots.clamp_min(0), RowFormat.FP8, gather_rows.DIM, torch.bfloat16)
    assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))
