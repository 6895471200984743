"""mHC of many tokens, casts and gathered rows in CUDA C++ at the sizes of V4.1-Flash, on a Hopper card."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.reference.cache_rows import RowFormat, load_rows
from deepinfer.kernels.reference.casts import cast_groups
from deepinfer.kernels.reference.hyper_connection import hc_post, hc_pre
from deepinfer.kernels.tile_kernels import casts
from deepinfer.kernels.tile_kernels.gather_rows import gather_rows
from deepinfer.kernels.tile_kernels.mix_streams import mix_many
from tests.kernels.cases import hc_mix, normal
from tests.kernels.test_tile_casts_on_host import hard_rows

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not on this card")


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("after_sub_layer", [True, False])
@pytest.mark.parametrize("n", [1, 16, 65, 1000, 2500])
def test_mix_of_many_tokens(n: int, after_sub_layer: bool):
    """Some warps without tokens, with one tile and with several; twice to the same bits."""
    g = torch.Generator().manual_seed(n)
    p_prev, fn, scale, base, norm, *constants = (
        t.cuda() if isinstance(t, Tensor) else t for t in hc_mix(g, n, 4, 5120)
    )
    h, y = normal(g, n, 4, 5120).bfloat16().cuda(), normal(g, n, 5120).bfloat16().cuda()
    norm = norm.bfloat16()
    mix = (y, normal(g, n, 4).cuda(), torch.rand(n, 4, 4, generator=g).cuda()) if after_sub_layer else None
    arguments = h, mix, p_prev, (fn, scale, base, norm), constants
    result, again = mix_many(*arguments), mix_many(*arguments)
    assert result is not None and again is not None
    assert all(torch.equal(one, other) for one, other in zip(result, again, strict=True))
    after, x, *coefficients = result
    if mix is not None:
        assert error(after, hc_post.reference(h.double(), *(t.double() for t in mix))) < 3e-3
    expected = hc_pre.reference(
        after.double(), *(t.double() for t in (p_prev, fn, scale, base)), norm.double(), *constants
    )
    assert error(x, expected[0]) < 5e-3
    assert all(error(one, other) < 1e-4 for one, other in zip(coefficients, expected[1:], strict=True))


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize(
    ("n", "height", "columns"),
    [
        (1000, 1, 5120),
        (1000, 1, 128),
        (1000, 128, 128),
        (130, 64, 64),
        (1000, 1000, 1),
        (4096, 4096, 1),
        (999, 100, 1),
        (999, 200, 1),
    ],
)
def test_casts(n: int, height: int, columns: int, ue8m0: bool):
    x = hard_rows(n, 5120).cuda()
    result = casts.cast(x, ue8m0, height, columns)
    assert result is not None
    expected = cast_groups.reference(x.float(), "e4m3", "ue8m0" if ue8m0 else "float32", height, columns)
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1].float().nan_to_num(-1), expected[1].float().nan_to_num(-1))


def test_gathered_rows():
    g = torch.Generator().manual_seed(0)
    table = torch.randint(0, 256, (3, 5000, 280), dtype=torch.uint8, generator=g)[:, :4096, 8:272].cuda()
    slots = torch.randint(-1, 3 * 4096, (5001, 3), generator=g).cuda()
    result = gather_rows(table, slots)
    assert result is not None
    expected = load_rows.reference(table, slots.clamp_min(0), RowFormat.FP8, 256, torch.bfloat16)
    assert torch.equal(result.nan_to_num(7.0), expected.nan_to_num(7.0))
