"""`top_k`: values and positions against a plain sort, and what it says about NaN; on a GPU with its backend."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels import ops
from tests.kernels.more_cases import normal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_value_is_a_stable_sort(device: str, dtype: torch.dtype):
    scores = normal(torch.Generator().manual_seed(0), 4, 3000).mul(8).round().to(device, dtype)
    values, positions = ops.top_k(scores, 100, None, True, "ignore")
    expected = scores.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :100])
    assert torch.equal(positions.long(), expected.indices[:, :100])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_end_before_k(device: str):
    scores = torch.tensor([[3.0, 1.0, 2.0, 9.0], [5.0, -INF, 7.0, 9.0]], device=device)
    ends = torch.tensor([2, 3], dtype=torch.int32, device=device)
    values, positions = ops.top_k(scores, 3, ends, True, "raise")
    assert values.tolist() == [[3.0, 1.0, -INF], [7.0, 5.0, -INF]]
    assert positions.tolist() == [[0, 1, -1], [2, 0, -1]]


@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_is_an_error_or_is_left_out(device: str):
    scores = torch.tensor([[1.0, NAN, 2.0]], device=device)
    with pytest.raises(ValueError, match="NaN"):
        ops.top_k(scores, 2, None, False, "raise")
    assert ops.top_k(scores, 2, None, False, "ignore")[1].tolist() == [[0, 2]]
    behind = torch.tensor([1], dtype=torch.int32, device=device)
    assert ops.top_k(scores, 2, behind, False, "raise")[1].tolist() == [[0, -1]]
    with pytest.raises(ValueError, match="'ignore' or 'raise'"):
        ops.top_k(scores, 2, None, False, "drop")


@pytest.mark.parametrize("device", DEVICES)
def test_more_rows_than_a_grid_is_high(device: str):
    scores = normal(torch.Generator().manual_seed(1), 70_000, 40).to(device)
    ends = (torch.arange(70_000, device=device) % 41).int()
    values, positions = ops.top_k(scores, 3, ends, True, "ignore")
    hidden = torch.arange(40, device=device) >= ends.unsqueeze(1)
    expected = scores.masked_fill(hidden, -INF).sort(dim=1, descending=True, stable=True)
    found = torch.arange(3, device=device) < ends.unsqueeze(1)
    assert torch.equal(values, expected.values[:, :3])
    assert torch.equal(positions.long(), expected.indices[:, :3].where(found, -1))
