"""The TileLang kernels: the same ones for both platforms; they lower to source and agree with the references.

The AscendC sources have never run on hardware; what a block computes is shared with the CUDA kernels.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.kernels.registry import OPERATIONS
from tests.kernels.cases import CASES
from tests.kernels.test_ops_backends import _to_cpu as to_cpu
from tests.kernels.test_ops_backends import compare, compare_draws, copied

tilelang = pytest.importorskip("tilelang")
tilelang_ops = importlib.import_module("deepinfer.kernels.tilelang_ops")
operations = importlib.import_module("deepinfer.kernels.tilelang_ops.operations")
importlib.import_module("deepinfer.kernels.tilelang_ops.calls")
compile_for_hopper = importlib.import_module("tests.kernels.tilelang_for_hopper").compile_for_hopper

CACHE = (128, 70_000)  # entries a page, numbers from page to page
SIZES: dict[str, tuple[Any, ...]] = {
    "rms_norm_tl": (512, 1e-6),
    "swiglu_tl": (256, 10.0),
    "rope_tl": (8, 128, 16, True),
    "norm_rope_tl": (96, 16, 1e-6),
    "round_rows_tl": (512, "e4m3", "ue8m0", 32),
    "cast_rows_tl": (512, "e2m1", "ue8m0", 32),
    "cast_blocks_tl": (512, "e4m3", "float32", 128, 1),
    "uncast_tl": (512, "e2m1", "ue8m0", 128, 1),
    "norm_cast_tl": (384, 1e-6),
    "swiglu_cast_tl": (128, 10.0),
    "rope_cast_tl": (8, 128, 16),
    "entry_slots_tl": (512, 64, 70, 128),
    "window_slots_tl": (128, 134),
    "load_rows_tl": (512, "nvfp4", *CACHE, 288),
    "store_rows_tl": (512, "fp8", *CACHE, 528),
    "engram_hash_tl": (3, 8, 2),
    "engram_gate_tl": (4, 384, 1e-20, True),
    "hc_post_tl": (512,),
    "hc_pre_tl": (384, 4, 20, 1e-6, 1e-20, "bfloat16"),
    "hc_post_pre_tl": (384, 4, 20, 1e-6, 1e-20, "bfloat16"),
    "moe_gate_tl": (384, 6, True, 1.5, False),
    "expert_order_tl": (24,),
    "expand_rows_tl": (512, 6),
    "reduce_rows_tl": (384, 4),
    "top_k_positions_tl": (2048, 16),
    "apply_token_bitmask_tl": (1000,),
    "find_candidates_tl": (2048,),
    "draw_tokens_tl": (2048,),
    "choose_draft_lengths_tl": (64, 5, False),
    "verify_tokens_tl": (5,),
}
MOST_CASES = 16  # of an operation whose arguments are checked: every combination of sizes is built
# TileLang's analysis of these takes a minute.
SLOW = {"expert_order_tl", "top_k_positions_tl", "find_candidates_tl", "draw_tokens_tl", "choose_draft_lengths_tl"}
APPROXIMATE = {"norm_cast", "swiglu_cast", "rope_cast"}  # a last bit of the norm may round to the next code


@cache
def factories(backend: str) -> dict[str, Any]:
    found = {}
    package = importlib.import_module(f"deepinfer.kernels.tilelang_ops.{backend}")
    for info in pkgutil.iter_modules(package.__path__):
        members = vars(importlib.import_module(f"{package.__name__}.{info.name}"))
        found.update({name: member for name, member in members.items() if name.endswith("_tl")})
    found.pop("sparse_attention_tl", None)  # test_tilelang_attention.py
    return found


def by_module() -> list[Any]:
    """The names of each module of factories, those that take long one by one."""
    groups: dict[str, list[str]] = {}
    for name, factory in factories("cuda").items():
        module = factory.__module__.rsplit(".", 1)[1]
        groups.setdefault(name if name in SLOW else module, []).append(name)
    return [pytest.param(n, id=key, marks=[pytest.mark.slow] if key in SLOW else []) for key, n in groups.items()]


def test_the_package_has_the_factories_of_its_platform():
    assert {name: getattr(tilelang_ops, name) for name in SIZES} == factories(tilelang_ops.BACKEND)


def test_every_kernel_is_written_for_both():
    assert set(factories("cuda")) == set(factories("asc")) == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_both_platforms_take_the_same_arguments(name: str):
    """The factories' parameters, and names, dtypes and shapes of their kernels' tensors. Ascend has no float64."""
    cuda, asc = (factories(backend)[name] for backend in ("cuda", "asc"))
    assert inspect.signature(cuda) == inspect.signature(asc)
    ours, theirs = (parameters(factory, SIZES[name]) for factory in (cuda, asc))
    assert [(n, d.replace("float64", "float32"), s) for n, d, s in ours] == theirs


@pytest.mark.parametrize("names", by_module())
@pytest.mark.parametrize(("backend", "entry"), [("cuda", "__global__ void"), ("asc", "__global__ __vector__ void")])
def test_lowers_to_source(backend: str, entry: str, names: list[str], tmp_path: Path):
    """One kernel of the platform's language each; the CUDA C++ of a module compiles for Hopper, headers read once."""
    texts = [tilelang_ops.source(factories(backend)[name](*SIZES[name]), backend) for name in names]
    for text in texts:
        assert len(re.findall(rf'extern "C" {re.escape(entry)}[^;]*\{{', text)) == 1
        assert ("asc_init" in text) == (backend == "asc")
        assert ("blockIdx" in text) == (backend == "cuda")
    if backend == "cuda":
        assert compile_for_hopper("\n".join(texts), tmp_path).startswith(b"\x7fELF")


@cache
def parameters(factory: Any, sizes: tuple[Any, ...]) -> list[tuple[str, str, list[int | None]]]:
    """Name, dtype and shape of each tensor of a kernel; None for a size that is known at the launch only."""
    function = factory(*sizes)
    buffers = [function.buffer_map[parameter] for parameter in function.params]
    constant = [[int(s) if isinstance(s, int) or hasattr(s, "value") else None for s in b.shape] for b in buffers]
    return [(buffer.name, str(buffer.dtype), shape) for buffer, shape in zip(buffers, constant, strict=True)]


@pytest.mark.parametrize("name", sorted(operations.CALLS))
def test_calls_pass_what_the_kernels_take(name: str, monkeypatch: pytest.MonkeyPatch):
    """Number, dtypes and fixed sizes of the tensors, of all cases of an operation."""
    launches = 0

    def compiled(kernel: str, sizes: tuple[Any, ...]):
        def check(*tensors: torch.Tensor) -> None:
            nonlocal launches
            launches += 1
            for tensor, (_, dtype, shape) in zip(
                tensors, parameters(getattr(tilelang_ops, kernel), sizes), strict=True
            ):
                assert str(tensor.dtype) == f"torch.{dtype}"
                assert len(tensor.shape) == len(shape)
                assert all(s is None or s == t for s, t in zip(shape, tensor.shape, strict=True))

        return check

    monkeypatch.setattr(operations, "compiled", compiled)
    cases = list(CASES[name](torch.Generator().manual_seed(0)))
    for case in random.Random(0).sample(cases, min(len(cases), MOST_CASES)):
        result, expected = operations.CALLS[name](*map(copied, case)), OPERATIONS[name].reference(*map(copied, case))
        if result is NotImplemented:
            continue
        pairs = zip(result, expected, strict=True) if isinstance(expected, tuple) else [(result, expected)]
        assert all(a is b is None or (a.dtype, a.shape) == (b.dtype, b.shape) for a, b in pairs)
    assert launches


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(operations.CALLS))
def test_agrees_with_the_operation(name: str):
    for case in CASES[name](torch.Generator().manual_seed(0)):
        ours, theirs = [copied(a, "cuda") for a in case], [copied(a) for a in case]
        result = operations.CALLS[name](*ours)
        if result is NotImplemented:
            continue
        result = to_cpu(result)
        expected = OPERATIONS[name].reference(*theirs)
        if name == "draw_tokens":
            compare_draws(result, expected)
        elif name in APPROXIMATE:
            widened = OPERATIONS["uncast_groups"].reference
            back = [widened(*r, "e4m3", "ue8m0", 1, 32, torch.float32) for r in (result, expected)]
            torch.testing.assert_close(*back, rtol=0.13, atol=1e-3)
            assert (result[0] != expected[0]).sum() <= 0.01 * result[0].numel()
        else:
            compare(name, result, expected)
        for before, after in zip(theirs, ours, strict=True):
            if isinstance(before, torch.Tensor):
                assert torch.equal(before.nan_to_num(), after.cpu().nan_to_num())
