"""Exact top-k of wide rows: launches top_k.cu."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit import Build, CompileError, Kernel

logger = logging.getLogger(__name__)

CLUSTER = 8  # blocks of a row, if there are few rows
SEGMENT, MAX_SEGMENT = 16384, 262144  # values of a block, by the shared memory of its bitmaps
_SHARED_BYTES = 4 * 4 * 2048 + 8 * 1024 + 8 * 16 + 32  # struct Shared


class _Params(ctypes.Structure):
    _fields_ = [
        ("scores", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("row_k", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("width", ctypes.c_int),
        ("k", ctypes.c_int),
        ("segment", ctypes.c_int),
    ]


def build(bf16: bool, aligned: bool, cluster: int) -> Build:
    defines: dict[str, int | str] = {"BF16": int(bf16), "ALIGNED": int(aligned), "CLUSTER": cluster}
    return Build("top_k", Path(__file__).parent / "top_k.cu", defines)


def builds() -> list[Build]:
    """What the engine launches: for `deepinfer kernels warmup`."""
    flags = (False, True)
    return [build(bf16, aligned, cluster) for bf16 in flags for aligned in flags for cluster in (1, CLUSTER)]


@cache
def _kernels(bf16: bool, device: int) -> dict[tuple[bool, int, bool], Kernel]:
    """All variants for a dtype by (aligned, cluster, wide segment), loaded: that cannot happen in a graph's capture.

    Empty if one does not compile.
    """
    kernels = {}
    for aligned in (True, False):
        for cluster in (1, CLUSTER):
            for segment in (SEGMENT, MAX_SEGMENT):
                kernel = Kernel(build(bf16, aligned, cluster), _SHARED_BYTES + segment // 4)
                try:
                    kernel.load()
                except CompileError as error:
                    logger.warning("top-k runs in Triton: %s", error)
                    return {}
                kernels[aligned, cluster, segment > SEGMENT] = kernel
    return kernels


@cache
def _hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def select_top_k(scores: Tensor, k: int, row_k: Tensor | None = None) -> Tensor | None:
    """Positions int32 [N, k] of the k largest of scores [N, width], ascending, -1 where there are fewer above -inf.

    scores float32 or BF16 with adjacent columns; row_k int64 [N]: so many of each row, at most k. Of equal scores the
    first are taken. None where the kernel does not run: other cards than Hopper, no compiler, very wide rows.
    """
    n, width = scores.shape
    if not scores.is_cuda or not _hopper(scores.device.index) or scores.dtype not in (torch.float32, torch.bfloat16):
        return None
    cluster = 1 if width <= 8192 or n >= 512 else CLUSTER
    segment = -(-width // (32 * cluster)) * 32
    if segment > MAX_SEGMENT or scores.stride(1) != 1:
        return None
    kernels = _kernels(scores.dtype is torch.bfloat16, scores.device.index)
    if not kernels:
        return None
    out = torch.empty(n, k, dtype=torch.int32, device=scores.device)
    if n:
        aligned = scores.data_ptr() % 16 == 0 and scores.stride(0) * scores.element_size() % 16 == 0
        rows = None if row_k is None else row_k.data_ptr()
        params = _Params(scores.data_ptr(), out.data_ptr(), rows, scores.stride(0), width, k, segment)
        kernels[aligned, cluster, segment > SEGMENT].launch((cluster, n, 1), (512, 1, 1), params)
    return out
