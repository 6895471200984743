"""Attention on a CPU shows that a barrier is missing: each is left out, one after the other."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.flash_mla.launch import Inputs, prepare
from deepinfer.kernels.flash_mla.variants import SOURCE
from tests.kernels.on_host import compile_on_host, copy_sources, needs_compiler
from tests.kernels.test_flash_mla import make_case
from tests.kernels.test_flash_mla_on_host import ENTRY, IMITATED

pytestmark = needs_compiler
CALL = re.compile(r"\b(?:barrier_wait|wait_for_half|barrier_arrive\w*|arrive_warp|wgmma_wait<\d>|meet<\w+>)\([^;{]*\);")
CHOOSE = 'static int left_out = -1;\nextern "C" void leave_out(int number) { left_out = number; }\n'
SEEDS = 8


def number_barriers(folder: Path) -> list[str]:
    """Makes every wait and arrival of the sources one that `leave_out` can skip; returns them in order."""
    found: list[str] = []

    def numbered(call: re.Match[str]) -> str:
        found.append(call[0])
        return f"if (left_out != {len(found) - 1}) {call[0]}"

    for name in ("attention.cu", "producer.cuh", "combine.cuh"):
        path = folder / "flash_mla" / name
        path.write_text(CALL.sub(numbered, path.read_text()))
    hopper = folder / "deep_jit" / "hopper.cuh"
    hopper.write_text(hopper.read_text() + CHOOSE)
    return found


def attention(folder: Path) -> Callable[[int, int], Tensor | None]:
    """A launch with barrier `number` left out and turns by `seed`: its result, None where threads wait for ever.

    Two tokens in one block, three pairs of tiles each, packed and copied rows, a query that is rotated in place.
    """
    case = make_case(3, 2, 64, 100, 200, kinds=("packed", "plain"), device="cpu")
    angle = torch.linspace(0, 6, 64).view(2, 32)
    out = torch.empty_like(case.q).contiguous()
    inputs = Inputs(*case.arguments, (angle.cos(), angle.sin()))
    variant, params = prepare(inputs, out, None, split=1)  # which point into `inputs`
    library = compile_on_host(folder, variant.build(), ENTRY)
    library.on_host.restype = ctypes.c_bool

    def launch(number: int, seed: int) -> Tensor | None:
        out.fill_(float("nan"))
        library.leave_out(number)
        ended = library.on_host(ctypes.byref(params), 1, seed)
        return out.clone() if ended and inputs else None

    return launch


def test_a_missing_barrier_shows(tmp_path: Path) -> None:
    copy_sources(tmp_path, SOURCE, IMITATED)
    barriers = number_barriers(tmp_path)
    assert len(barriers) > 25
    launch = attention(tmp_path)
    right = launch(-1, 0)
    assert right is not None and right.isfinite().all()
    assert all(torch.equal(launch(-1, seed), right) for seed in range(1, 4))

    def shows(number: int) -> bool:
        return any((out := launch(number, seed)) is None or not torch.equal(out, right) for seed in range(SEEDS))

    unseen = {number: call for number, call in enumerate(barriers) if not shows(number)}
    assert not unseen
