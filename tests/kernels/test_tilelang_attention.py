"""Sparse attention in TileLang: lowers to source for both platforms, and agrees with the reference on a GPU."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.kernels.test_flash_mla import KINDS, ROUNDING, make_case, relative_error

tilelang = pytest.importorskip("tilelang")
compile_for_hopper = importlib.import_module("tests.kernels.tilelang_for_hopper").compile_for_hopper
tilelang_ops = importlib.import_module("deepinfer.kernels.tilelang_ops")
PLAIN = (("bfloat16", 134, 134 * 512, 512), ("bfloat16", 64, 64 * 512, 512))
PACKED = (("fp8", 134, 134 * 528, 528), ("nvfp4", 128, 128 * 288, 288))
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(
    ("backend", "rows", "products"),
    [
        ("cuda", PLAIN, r"tl::wgmma_[sr]s<"),
        ("asc", PACKED, r"ascend_gemm_l1<16, \d+, \d+, \d+, true, bfloat16_t>"),
        pytest.param("cuda", PACKED, r"tl::wgmma_[sr]s<", marks=pytest.mark.slow),  # a minute
    ],
)
def test_lowers_to_source(backend, rows, products, tmp_path):
    """One kernel with two products for each cache; on Ascend for the cube, beside the vector cores' part."""
    factory = importlib.import_module(f"deepinfer.kernels.tilelang_ops.{backend}.attention").sparse_attention_tl
    text = tilelang_ops.source(factory(64, 512, 512**-0.5, 128, 512, *rows), backend)
    assert len(re.findall(r'extern "C" __global__ [^;]*\bsparse_attention_kernel\([^;]*\{', text)) == 1
    assert len(re.findall(products, text)) == 4
    assert ("ASC_IS_AIC" in text and "ASC_IS_AIV" in text) == (backend == "asc")
    if backend == "cuda":
        assert compile_for_hopper(text, tmp_path).startswith(b"\x7fELF")


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("shape", [(3, 64, 128, 512), (5, 16, 100, 77), (2, 128, 1, None)], ids=str)
def test_agrees_with_float64(shape, kinds):
    from deepinfer.kernels.tilelang_ops.attention import sparse_attention

    case = make_case(sum(n or 0 for n in shape), *shape, kinds=kinds)
    case.window_slots[0] = -1  # no key of the window, or none at all
    result = sparse_attention(*case.arguments)
    assert result is not NotImplemented
    assert relative_error(result, case.expected()) < ROUNDING
