"""Small launches for compute-sanitizer: python -m tests.kernels.sanitized_attention [NAME ...]; `names()` has them all.

Three tokens on two processors: tiles that are full, cut off and empty, one token after the other in the same block.
"""

from __future__ import annotations

import ctypes
import sys
from itertools import product
from pathlib import Path

import torch

from deepinfer.kernels.deep_jit import Build, Kernel
from deepinfer.kernels.flash_mla import launch as launcher
from deepinfer.kernels.flash_mla.attention import fused_attention
from tests.kernels.test_flash_mla import FORMATS, ROUNDING, make_case, relative_error

SPLITS = ("1", "2", "4")
HAND_OVERS = {"take_turns": "01", "copies_then_peers": "012"}  # kernels of hand_over.cu and their variants


def names() -> list[str]:
    """Attention over rows of some formats with a split, the fused kernel, hand-overs alone."""
    attention = ["-".join(pair) for pair in product(FORMATS, SPLITS)]
    return [*attention, "fused", *(f"{name}-{way}" for name, ways in HAND_OVERS.items() for way in ways)]


def run_attention(name: str) -> float:
    launcher._processors = lambda device: 2  # type: ignore[assignment]
    if name == "fused":
        case = make_case(1, 3, 64, 128, 200, kinds=("packed", "packed"))
        ones = torch.ones(3, 32, device="cuda")
        fused_attention(case.q, ones, ones * 0, *case.arguments[1:], q_norm=True)  # with the cast to FP8
        result = fused_attention(case.q, ones, ones * 0, *case.arguments[1:], fp8=False)[0]
    else:
        kinds, split = name.rsplit("-", 1)
        case = make_case(1, 3, 64, 128, 200, kinds=tuple(kinds.split("-")))  # type: ignore[arg-type]
        result = torch.full_like(case.q, float("nan")).contiguous()
        launcher.launch(launcher.Inputs(*case.arguments), result, split=int(split))
    return relative_error(result, case.expected())


def run_hand_over(name: str) -> None:
    """`hand_over.cu` with NAMED and COPIES as the number in the name says."""
    kernel, way = name.rsplit("-", 1)
    built = Kernel(Build(kernel, Path(__file__).parent / "hand_over.cu", {"NAMED": way, "COPIES": way}))
    out, rounds = torch.zeros(256, 4, dtype=torch.int32, device="cuda"), ctypes.c_int(5)
    pointer = ctypes.c_void_p(out.data_ptr())
    if kernel == "take_turns":
        built.launch((1, 1, 1), (256, 1, 1), pointer, rounds)
    else:
        source = torch.ones(128, 4, dtype=torch.int32, device="cuda")
        built.launch((2, 1, 1), (128, 1, 1), ctypes.c_void_p(source.data_ptr()), pointer, rounds)
    torch.cuda.synchronize()
    assert out.any()


def main(chosen: list[str]) -> None:
    for name in chosen or names():
        if name.rsplit("-", 1)[0] in HAND_OVERS:
            run_hand_over(name)
        else:
            error = run_attention(name)
            assert error < ROUNDING, (name, error)
        print("ran", name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
