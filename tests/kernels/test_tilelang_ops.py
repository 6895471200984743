"""The TileLang kernels: both backends have the same ones, lower to source, and agree with the references on a GPU."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch

from deepinfer.kernels import ops
from tests.kernels.cases import integers, normal

tilelang = pytest.importorskip("tilelang")
tilelang_ops = importlib.import_module("deepinfer.kernels.tilelang_ops")

VOCAB = 1000
SIZES: dict[str, tuple[Any, ...]] = {
    "rms_norm_tl": (512, 1e-6),
    "swiglu_tl": (256, 10.0),
    "rope_tl": (8, 128, 16),
    "entry_slots_tl": (512, 64, 128),
    "window_slots_tl": (128, 134),
    "load_rows_tl": (512,),
    "apply_token_bitmask_tl": (VOCAB,),
    "hc_post_tl": (512,),
}


def factories(backend: str) -> dict[str, Any]:
    found = {}
    for module in ("rows", "caches"):
        members = vars(importlib.import_module(f"deepinfer.kernels.tilelang_ops.{backend}.{module}"))
        found.update({name: member for name, member in members.items() if name.endswith("_tl")})
    return found


def test_the_package_has_the_factories_of_its_platform():
    assert tilelang_ops.BACKEND == tilelang_ops.PLATFORM.tilelang_ops_backend or tilelang_ops.PLATFORM.name == "cpu"
    backend = tilelang_ops.BACKEND
    assert {name: getattr(tilelang_ops, name) for name in SIZES} == factories(backend)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("backend", "entry"), [("cuda", "__global__ void"), ("asc", "__global__ __vector__ void")])
def test_lowers_to_source(backend: str, entry: str, name: str):
    """One kernel, whose arguments are those of the function, and that writes its last one."""
    text = tilelang_ops.source(factories(backend)[name](*SIZES[name]), backend)
    assert len(re.findall(rf'extern "C" {re.escape(entry)}[^;]*\{{', text)) == 1
    assert ("__ubuf__" in text) == (backend == "asc")
    assert ("blockIdx" in text) == (backend == "cuda")


def test_every_operation_is_written_for_both():
    assert set(factories("cuda")) == set(factories("asc")) == set(SIZES)


def window_slots(positions: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    wanted = positions[:, None] + torch.arange(-127, 1)
    return torch.where(wanted < 0, -1, states[:, None] * 134 + wanted % 134).int()


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
def test_agrees_with_the_operation(name: str):
    g = torch.Generator().manual_seed(0)
    n, bf16 = 9, torch.bfloat16
    angle = normal(g, n, 16)
    inputs = {
        "rms_norm_tl": (normal(g, n, 512).to(bf16), normal(g, 512).to(bf16)),
        "swiglu_tl": (normal(g, n, 512).to(bf16),),
        "rope_tl": (normal(g, n, 8, 128).to(bf16), angle.cos(), angle.sin()),
        "entry_slots_tl": (integers(g, -1, 64 * 128, n, 512), integers(g, 0, 1000, 3, 64), integers(g, 0, 3, n)),
        "window_slots_tl": (integers(g, 0, 300, n), integers(g, 1, 9, n)),
        "load_rows_tl": (normal(g, 100, 512).to(bf16), integers(g, -1, 100, n)),
        "apply_token_bitmask_tl": (normal(g, n, VOCAB), integers(g, -(2**31), 2**31, n, 32)),
        "hc_post_tl": (normal(g, n, 4, 512).to(bf16), normal(g, n, 512).to(bf16), normal(g, n, 4), normal(g, n, 4, 4)),
    }[name]
    expected = {
        "rms_norm_tl": lambda x, w: ops.rms_norm.reference(x.float(), w.float(), 1e-6),
        "swiglu_tl": lambda x: ops.swiglu.reference(x.float(), 10.0),
        "rope_tl": lambda x, c, s: ops.rope.reference(x.float(), c, s, False),
        "entry_slots_tl": lambda p, t, s: ops.entry_slots.reference(p, t, s, 128),
        "window_slots_tl": window_slots,
        "load_rows_tl": lambda cache, slots: cache[slots.clamp_min(0).long()].float(),
        "apply_token_bitmask_tl": ops.apply_token_bitmask.reference,
        "hc_post_tl": lambda h, *rest: ops.hc_post.reference(h.float(), *rest),
    }[name](*inputs)
    dtype = bf16 if inputs[0].dtype is bf16 else expected.dtype
    out = torch.zeros(expected.shape, dtype=dtype, device="cuda")
    tilelang.compile(getattr(tilelang_ops, name)(*SIZES[name]))(*(t.cuda() for t in inputs), out)
    torch.testing.assert_close(out.cpu().to(expected.dtype), expected, rtol=1e-2, atol=1e-2)
