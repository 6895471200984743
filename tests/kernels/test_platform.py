"""The platform is taken from what PyTorch finds, and decides which backends register."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepinfer.kernels import ops, platform
from deepinfer.kernels.registry import OPERATIONS


@pytest.mark.parametrize(
    ("npu", "cuda", "backend"),
    [(True, False, "asc"), (True, True, "asc"), (False, True, "cuda"), (False, False, "cpu"), (None, False, "cpu")],
)
def test_detection(npu, cuda, backend, monkeypatch):
    monkeypatch.delattr(torch, "npu", raising=False)
    if npu is not None:
        monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: npu), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert platform.detect().tilelang_ops_backend == backend


def test_backends_of_this_machine():
    """One name an operation, a reference each, and GPU backends only where there is a GPU."""
    devices = {device for operation in OPERATIONS.values() for device in operation.backends}
    assert devices <= {"cpu", "cuda"}
    assert "cuda" not in devices or platform.PLATFORM.tilelang_ops_backend == "cuda"
    assert all(
        operation.reference.__module__.startswith("deepinfer.kernels.reference") for operation in OPERATIONS.values()
    )
    assert ops.sparse_attention is OPERATIONS["sparse_attention"]
