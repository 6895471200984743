"""RowGraphs: padding harms no row, on a CPU; replays are the eager call, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.engine.row_graphs import RowGraphs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_every_number_of_rows_gives_what_the_call_gives(device: str) -> None:
    table = torch.arange(40.0, device=device).view(8, 5)
    seen: list[int] = []

    def call(slots: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(slots))
        rows = table[slots] * scale
        return rows, rows.sum(1)

    padding = [torch.zeros((), dtype=torch.int64, device=device), torch.ones(1, device=device)]
    graphs = RowGraphs(call, padding, [1, 2, 4, 7])
    if device == "cuda":
        graphs.capture()
        assert graphs.is_captured and graphs.capture_seconds > 0
    for num_rows in (7, 3, 1, 5, 2, 4, 6):
        slots = torch.arange(num_rows, device=device) % 5 + 1
        scale = torch.arange(1.0, num_rows + 1, device=device).unsqueeze(1)
        expected = call(slots, scale)
        seen.clear()
        got = graphs.run(slots, scale)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
        assert seen == ([] if device == "cuda" else [min(s for s in graphs.sizes if s >= num_rows)])


def test_rows_behind_the_last_one_are_padding() -> None:
    """Also after a larger call has left its rows there."""
    touched: list[list[int]] = []

    def call(slots: Tensor) -> tuple[Tensor]:
        touched.append(slots.tolist())
        return (slots,)

    graphs = RowGraphs(call, [torch.tensor(0)], [2, 4])
    graphs.run(torch.tensor([5, 6, 7, 8]))
    graphs.run(torch.tensor([3]))
    graphs.run(torch.tensor([1, 2, 4]))
    assert touched == [[5, 6, 7, 8], [3, 0], [1, 2, 4, 0]]


def test_too_many_rows_are_refused() -> None:
    graphs = RowGraphs(lambda rows: (rows,), [torch.tensor(0)], [2, 4])
    with pytest.raises(ValueError, match="5 rows exceeds 4"):
        graphs.run(torch.zeros(5, dtype=torch.int64))
