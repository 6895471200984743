"""The CUDA C++ selection compiled for the CPU, its threads as fibers, against the reference: no GPU needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from deepinfer.kernels.deep_select import top_k
from deepinfer.kernels.reference.indexer import top_k_positions
from tests.kernels.cases import INF, NAN, normal

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
SOURCE = """
#include "top_k.cu"
extern "C" void on_host(const Params* p, int rows, int shared_bytes) {
    run(CLUSTER, rows, THREADS, shared_bytes, [=] { top_k(*p); });
}
"""


@pytest.fixture(scope="module")
def select(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("select")
    shutil.copy(Path(top_k.__file__).parent / "top_k.cu", folder)
    shutil.copy(Path(__file__).parent / "cluster_on_host.cuh", folder / "cluster.cuh")
    (folder / "host.cpp").write_text(SOURCE)

    @cache
    def library(bf16: bool, cluster: int) -> ctypes.CDLL:
        built = folder / f"{bf16}{cluster}.so"
        macros = [f"-DBF16={int(bf16)}", f"-DCLUSTER={cluster}"]
        command = [str(COMPILER), "-O1", "-std=c++17", "-w", "-shared", "-fPIC", *macros, "host.cpp", "-o", str(built)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        return ctypes.CDLL(str(built))

    def run(scores: torch.Tensor, k: int, row_k: torch.Tensor | None = None) -> torch.Tensor:
        chosen = top_k.plan(scores.shape[1], k)
        assert chosen is not None
        out = torch.full((len(scores), k), -7, dtype=torch.int32)
        parameters = top_k.parameters(scores, k, row_k, out, chosen)
        on_host = library(scores.dtype is torch.bfloat16, chosen.cluster).on_host
        on_host(ctypes.byref(parameters), len(scores), chosen.shared_bytes)
        return out

    return run


def scores_of(kind: str, n: int, width: int) -> torch.Tensor:
    scores = normal(torch.Generator().manual_seed(width), n, width)
    column = torch.arange(width)
    if kind == "tied":
        return scores.mul(8).round()
    if kind == "short":  # few above -inf, all of them at the start
        return scores.masked_fill(column >= min(700, width // 2), -INF)
    if kind == "zeros":
        return torch.where(column % 2 == 0, 0.0, -0.0).expand(n, -1).contiguous()
    if kind == "broken":
        scores = torch.where(column % 97 < 2, torch.where(column % 97 == 0, NAN, -NAN), scores)
        return torch.where(column % 31 == 5, INF, scores)
    return scores


@pytest.mark.parametrize("kind", ["normal", "tied", "short", "zeros", "broken"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "width", "k"), [(3, 33, 40), (1, 8191, 512), (1, 20001, 512), (1, 40000, 1500)])
def test_selects_as_a_stable_sort(select, n: int, width: int, k: int, kind: str, dtype: torch.dtype):
    """Narrow rows by one block, wide ones by a cluster; zeros overflow the lists of a cluster."""
    scores = scores_of(kind, n, width).to(dtype)
    assert torch.equal(select(scores, k), top_k_positions.reference(scores, k))


def test_more_than_one_chunk_a_block(select):
    scores = scores_of("normal", 1, 140_000).bfloat16()
    assert torch.equal(select(scores, 512), top_k_positions.reference(scores, 512))


def test_rows_that_are_not_aligned_and_a_number_for_each(select):
    scores = scores_of("tied", 3, 9003)[:, 2:9001]
    counts = torch.tensor([1, 30, 70])
    result = select(scores, 60, counts)
    for row, count in enumerate(counts.tolist()):
        expected = top_k_positions.reference(scores[row : row + 1], min(count, 60))[0]
        assert torch.equal(result[row, : len(expected)], expected)
        assert bool((result[row, len(expected) :] == -1).all())
