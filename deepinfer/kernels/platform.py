"""Which kind of accelerator this process runs on, as far as the choice of kernels goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Platform:
    """tilelang_ops_backend: the subpackage of `tilelang_ops` for it."""

    name: str
    tilelang_ops_backend: str


def detect() -> Platform:
    """Ascend where torch_npu has a device, else CUDA, whose kernels can also be lowered without one."""
    if hasattr(torch, "npu") and torch.npu.is_available():
        return Platform("ascend", "asc")
    return Platform("cuda", "cuda")


PLATFORM = detect()
