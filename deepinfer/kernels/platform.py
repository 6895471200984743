"""Which kind of accelerator this process runs on, as far as the choice of kernels goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Platform:
    """tilelang_ops_backend: "cuda" or "asc", the subpackage of `tilelang_ops` for it; "cpu" has C kernels instead."""

    name: str
    tilelang_ops_backend: str


def detect() -> Platform:
    """Ascend where torch_npu has a device, then CUDA, then the CPU alone."""
    if hasattr(torch, "npu") and torch.npu.is_available():
        return Platform("ascend", "asc")
    if torch.cuda.is_available():
        return Platform("cuda", "cuda")
    return Platform("cpu", "cpu")


PLATFORM = detect()
