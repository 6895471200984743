"""Small launches for compute-sanitizer: python -m tests.kernels.sanitized_operations [NAME ...]; see `names()`.

'cuda', 'tiles' and 'mix' are kernels in CUDA C++: selection and gate, casts and gathered rows, mHC. Other names are
operations, on their cases.
"""

from __future__ import annotations

import sys
import time

import torch

import deepinfer.kernels.ops  # noqa: F401  (registers the backends)
from deepinfer.kernels.deep_select.gate import choose_experts
from deepinfer.kernels.deep_select.top_k import select_top_k
from deepinfer.kernels.registry import OPERATIONS
from deepinfer.kernels.tile_kernels import casts
from deepinfer.kernels.tile_kernels.gather_rows import gather_rows
from deepinfer.kernels.tile_kernels.mix_streams import FEWEST
from tests.kernels.cases import CASES, hc_mix
from tests.kernels.test_cuda_kernels import as_bf16
from tests.kernels.test_ops_backends import copied

ELSEWHERE = ("attention", "index_scores", "moe_experts", "linear")  # products: they have runs of their own
SECONDS = 5.0  # of an operation's cases


def names() -> list[str]:
    """What can be asked for."""
    here = (name for name, op in OPERATIONS.items() if "cuda" in op.backends)
    return [*CUDA, *sorted(name for name in here if not any(word in name for word in ELSEWHERE))]


def run_cuda() -> None:
    """Candidates that fit and that do not, short contexts, rows with ends; gates with and without ties."""
    for width, k in ((131072, 512), (9000, 512), (300, 8), (129279, 50), (40000, 4096)):
        for dtype in (torch.float32, torch.bfloat16):
            scores = torch.randn(2, width, device="cuda").to(dtype)
            ends = torch.tensor([width, width // 30], dtype=torch.int32, device="cuda")
            for one in (scores, torch.ones_like(scores)):
                assert select_top_k(one, k) is not None and select_top_k(one, k, None, ends) is not None
    for dtype in (torch.float32, torch.bfloat16):  # so many rows of these have two large blocks each
        scores = torch.randn(33, 98304, device="cuda").to(dtype)
        assert select_top_k(scores, 512) is not None
    for logits in (torch.randn(100, 384, device="cuda"), torch.ones(100, 384, device="cuda")):
        assert choose_experts(logits, logits[0], 6, True, 1.0) is not None


def run_tiles() -> None:
    """Casts of all kinds, and gathered rows."""
    x = torch.randn(200, 1152, device="cuda").bfloat16()
    for group in ((1, 1152), (1, 128), (128, 128), (64, 64), (200, 1), (100, 1)):
        assert all(casts.cast(x, ue8m0, *group) is not None for ue8m0 in (False, True))
    many = torch.randn(1000, 64, device="cuda").bfloat16()
    assert casts.cast(many, False, 1000, 1) is not None  # a cluster
    angles = torch.randn(200, 8, device="cuda")
    assert casts.norm_cast(x, x[0], 1e-6) is not None and casts.swiglu_cast(x, 10.0) is not None
    assert casts.rope_cast(x.unflatten(1, (9, 128)), angles, angles, 1.0) is not None
    table = torch.randint(0, 255, (1, 500, 264), dtype=torch.uint8, device="cuda")
    assert gather_rows(table, torch.randint(-1, 500, (333,), device="cuda")) is not None


def run_mix() -> None:
    """mHC of few and of many tokens."""
    g = torch.Generator().manual_seed(0)
    for n, dim in ((3, 384), (9, 5120), (70, 384), (FEWEST + 5, 5120), (FEWEST, 1024)):
        p_prev, fn, scale, base, norm, *rest = hc_mix(g, n, 4, dim)
        wide = [t.cuda() for t in (torch.randn(n, 4), torch.rand(n, 4, 4), p_prev, fn, scale, base)]
        h, y = torch.randn(n, 4, dim, device="cuda").bfloat16(), torch.randn(n, dim, device="cuda").bfloat16()
        OPERATIONS["hc_post_pre"](h, y, *wide, norm.bfloat16().cuda(), *rest)
        OPERATIONS["hc_pre"](h, *wide[2:], norm.bfloat16().cuda(), *rest)


CUDA = {"cuda": run_cuda, "tiles": run_tiles, "mix": run_mix}


def run(name: str) -> int:
    """How many cases ran."""
    start, count = time.monotonic(), 0
    for case in CASES[name](torch.Generator().manual_seed(0)):
        for variant in (case, as_bf16(name, case)):
            OPERATIONS[name].backends["cuda"](*(copied(argument, "cuda") for argument in variant))
            count += 1
        if time.monotonic() - start > SECONDS:
            break
    return count


if __name__ == "__main__":
    for chosen in sys.argv[1:] or names():
        print(chosen, "cases:", CUDA[chosen]() if chosen in CUDA else run(chosen), flush=True)
        torch.cuda.synchronize()
