"""The CUDA C++ selection against the reference, on a Hopper card."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.deep_select.top_k import select_top_k
from deepinfer.kernels.reference.indexer import top_k_positions
from tests.kernels.cases import INF, normal

pytestmark = pytest.mark.gpu
SHAPES = [(3, 131072, 512), (2, 40000, 4096), (1, 1_000_000, 512), (64, 20000, 64), (2, 129279, 50), (3, 33, 40)]


def scores_of(kind: str, n: int, width: int) -> torch.Tensor:
    scores = normal(torch.Generator().manual_seed(width), n, width)
    if kind == "tied":
        return scores.mul(8).round()
    if kind == "hidden":  # few above -inf
        return scores.masked_fill(torch.arange(width) >= min(700, width // 2), -INF)
    if kind == "constant":
        return torch.full_like(scores, 1.5)
    if kind == "clustered":  # more candidates in a block than its list holds
        return scores + 10 * (torch.arange(width) < width // 6)
    return scores


@pytest.mark.parametrize("kind", ["normal", "tied", "hidden", "constant", "clustered"])
@pytest.mark.parametrize(("n", "width", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selects_as_a_stable_sort(n: int, width: int, k: int, kind: str, dtype: torch.dtype):
    scores = scores_of(kind, n, width).to(dtype)
    result = select_top_k(scores.cuda(), k)
    if result is None:
        pytest.skip("not on this machine")
    assert torch.equal(result.cpu(), top_k_positions.reference(scores, k))


def test_a_number_for_every_row():
    scores = scores_of("tied", 20, 30000)
    counts = torch.arange(1, 21) * 7
    result = select_top_k(scores.cuda(), 100, counts.cuda())
    if result is None:
        pytest.skip("not on this machine")
    for row, count in enumerate(counts.tolist()):
        expected = top_k_positions.reference(scores[row : row + 1], min(count, 100))[0]
        assert torch.equal(result[row].cpu()[: len(expected)], expected)
        assert bool((result[row, len(expected) :] == -1).all())
