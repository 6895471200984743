"""Fixtures of the kernels' tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def poisoned_memory() -> None:
    """Freed GPU memory holds NaN, so that an output that was not written shows."""
    if torch.cuda.is_available():
        torch.full((1 << 26,), float("nan"), device="cuda")
