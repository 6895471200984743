"""The Hopper attention kernel compiled for the CPU, its threads as fibers, against float64 attention: no GPU needed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.flash_mla.launch import Inputs, prepare, shared_bytes
from deepinfer.kernels.flash_mla.variants import SOURCE, Variant
from tests.kernels.on_host import compile_on_host, copy_sources, needs_compiler
from tests.kernels.test_flash_mla import DIM, ROUNDING, Case, make_case, relative_error, rotate

pytestmark = needs_compiler
IMITATED = {"instructions.cuh": "attention_on_host.cuh"}
ENTRY = """
extern "C" int shared_bytes() { return SHARED_BYTES; }
extern "C" bool on_host(const Params* p, int clusters, u32 seed) {
    std::mt19937 random(seed);
    forget_launch(&random);
    TensorMap map = {p->query.base, p->query.token_stride, p->query.head_stride};
    return run(SPLIT, clusters, 384, SHARED_BYTES, [=] { sparse_attention(*p, map); });
}
"""
compiled: dict[Variant, Any] = {}  # on_host of each


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attention")
    copy_sources(folder, SOURCE, IMITATED)
    return folder


def compile_for_host(folder: Path, variant: Variant) -> Any:
    if variant not in compiled:
        library = compile_on_host(folder, variant.build(), ENTRY)
        assert library.shared_bytes() == shared_bytes(variant.split) <= 227 * 1024
        compiled[variant] = library.on_host
        compiled[variant].restype = ctypes.c_bool
    return compiled[variant]


def attend(
    folder: Path,
    case: Case,
    split: int = 1,
    clusters: int | None = None,
    angle: Tensor | None = None,
    q_norm: bool = False,
    fp8: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """What the kernel writes, all of it: the outputs are poisoned."""
    out = torch.full(case.q.shape, float("nan"), dtype=torch.bfloat16)
    scales = None
    if fp8:
        out = torch.full(case.q.shape, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scales = torch.full((*case.q.shape[:2], DIM // 32), 255, dtype=torch.uint8)
    angles = None if angle is None else (angle.cos().float(), angle.sin().float())
    inputs = Inputs(*case.arguments, angles, q_norm)
    variant, params = prepare(inputs, out, scales, split)
    items = len(case.q) * case.q.shape[1] // 64
    clusters = items if split > 1 or clusters is None else clusters
    ended = compile_for_host(folder, variant)(ctypes.byref(params), clusters, seed)
    assert ended, "threads wait for each other for ever"
    return out, scales


@pytest.mark.parametrize("split", (1, 2, 4))
@pytest.mark.parametrize("kinds", ("plain-plain", "packed-packed", "packed-fp8"))
def test_agrees_with_float64(folder, kinds, split):
    """Three tokens, one with no key at all, on two processors where they take turns."""
    case = make_case(split, 3, 64, 100, 200, kinds=tuple(kinds.split("-")), device="cpu")
    case.window_slots[1] = case.latent_slots[1] = -1
    result, _ = attend(folder, case, split, clusters=2)
    assert (result[1] == 0).all()
    assert relative_error(result, case.expected()) < ROUNDING


def test_a_window_alone_of_128_heads(folder):
    case = make_case(7, 2, 128, 130, None, kinds=("packed", "plain"), device="cpu")
    result, _ = attend(folder, case, clusters=2)
    assert relative_error(result, case.expected()) < ROUNDING


def test_rotated(folder):
    """Window in BF16 as in prefill, in one page, with compressed rows."""
    case = make_case(8, 2, 64, 64, 70, kinds=("plain", "packed"), pages=(1, 9), device="cpu")
    angle = torch.rand(2, 32, dtype=torch.float64) * 6.28
    result, _ = attend(folder, case, clusters=1, angle=angle)
    assert relative_error(result, rotate(case.expected(rotate(case.q.double(), angle)), -angle)) < 6e-3


@pytest.mark.parametrize("split", (1, 4))
def test_fused_with_norm_and_cast(folder, split):
    case = make_case(9 + split, 2, 64, 128, 130, kinds=("packed", "packed"), device="cpu")
    angle = torch.rand(2, 32, dtype=torch.float64) * 6.28
    values, scales = attend(folder, case, split, clusters=1, angle=angle, q_norm=True, fp8=True)
    q = case.q.double()
    q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-20)
    groups = rotate(case.expected(rotate(q, angle)), -angle).unflatten(-1, (16, 32))
    size = torch.exp2(scales.double() - 127)
    result = values.double().unflatten(-1, (16, 32)) * size.unsqueeze(-1)
    assert relative_error(result, groups) < 4e-2  # E4M3 rounds to 1 / 16
    exact = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1).clamp_min(1e-4) / 448)))
    assert (size == exact).double().mean() > 0.98  # a maximum next to a power of two may fall on its other side


@pytest.mark.parametrize("kinds", ("plain-plain", "packed-packed"))
@pytest.mark.parametrize("split", (1, 2))
def test_bits_depend_on_neither_turns_nor_neighbours(folder, kinds, split):
    """Threads that take turns in another order find another order of sums only where a barrier is missing."""
    case = make_case(15, 3, 64, 100, 200, kinds=tuple(kinds.split("-")), device="cpu")
    together, _ = attend(folder, case, split, clusters=1)
    assert torch.equal(attend(folder, case, split, clusters=2, seed=1)[0], together)
    token = slice(2, 3)
    slots = case.window_slots[token], case.latent_slots[token]
    if split == 1:  # and absent slots behind the others change none
        slots = slots[0], torch.nn.functional.pad(slots[1], (0, 130), value=-1)
    alone = Case(case.q[token], case.window_cache, slots[0], case.latent_cache, slots[1], case.sink)
    assert torch.equal(attend(folder, alone, split, seed=2)[0], together[token])
