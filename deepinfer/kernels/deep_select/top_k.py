"""Exact top-k of wide rows: launches top_k.cu."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit import Build, Kernel
from deepinfer.kernels.registry import USES_CUDA_CPP

VALUES = 64  # of a thread, in registers
WINDOW = 131072  # values that a cluster holds at a time
CLUSTER = 8  # blocks of a wide row,
LARGE_BLOCKS = 2  # but so many where a block a multiprocessor is enough for all rows, and small ones would share them
FEW_ROWS, MANY_ROWS = 32, 66  # between these,
VERY_WIDE = 98304  # and rows have at least so many values
NARROW = 8192  # values of a row that one block takes
MOST_CHUNKS = 16
_SHARED_LIMIT = 227 * 1024


class _Params(ctypes.Structure):
    _fields_ = [
        ("scores", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("row_k", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("width", ctypes.c_int),
        ("k", ctypes.c_int),
        ("vector_end", ctypes.c_int),
        ("chunks", ctypes.c_int),
        ("list", ctypes.c_int),
        ("fine", ctypes.c_int),
    ]


@dataclass(frozen=True)
class Plan:
    """How a row is selected: blocks and their threads, most chunks of cluster * threads * VALUES values, and candidates
    that a block may have; `fine`: many are wanted."""

    cluster: int
    threads: int
    chunks: int
    list: int
    fine: bool

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, as the kernel lays it out."""
        fixed = -(-(8 * (self.threads // 32) + 8 * self.cluster + 4 * 10) // 16) * 16
        values = self.threads * VALUES
        bitmap = max(self.cluster * values // 8 + 4 * self.threads, self.chunks * values // 4)
        return fixed + self.cluster * 8 * self.list + 4 * (1024 + max(self.list, 520)) + bitmap


def plan(width: int, k: int, cluster: int = CLUSTER) -> Plan | None:
    """None for rows that are too wide."""
    if width <= NARROW:
        return Plan(1, 256, 1, NARROW // 2 if width <= NARROW // 2 else NARROW, True)
    chunks = -(-width // WINDOW)
    if chunks > 1:
        cluster, chunks = CLUSTER, MOST_CHUNKS // 4 if chunks <= MOST_CHUNKS // 4 else MOST_CHUNKS
    of_row = 4096 if k <= 512 else 8192 if k <= 1024 else 16384
    chosen = Plan(cluster, WINDOW // cluster // VALUES, chunks, of_row // cluster, k > 1024)
    return chosen if width <= chunks * WINDOW and chosen.shared_bytes <= _SHARED_LIMIT else None


def blocks_of_a_row(n: int, width: int) -> int:
    """How many blocks share each of n wide rows: small ones wait less, large ones meet less often."""
    return LARGE_BLOCKS if FEW_ROWS < n <= MANY_ROWS and width >= VERY_WIDE else CLUSTER


def build(bf16: bool, chosen: Plan) -> Build:
    defines: dict[str, int | str] = {"BF16": int(bf16), "CLUSTER": chosen.cluster, "THREADS": chosen.threads}
    return Build("top_k", Path(__file__).parent / "top_k.cu", defines)


def builds() -> list[Build]:
    """What the engine launches: for `deepinfer kernels warmup`."""
    shapes = ((NARROW, CLUSTER), (WINDOW, CLUSTER), (WINDOW, LARGE_BLOCKS))
    plans = [chosen for width, cluster in shapes if (chosen := plan(width, 512, cluster)) is not None]
    return [build(bf16, chosen) for bf16 in (False, True) for chosen in plans]


@cache
def _kernels(bf16: bool, device: int) -> dict[Plan, Kernel]:
    """Kernels for a dtype by plan, loaded: that cannot happen in a graph's capture. Empty if one does not compile."""
    widths = (NARROW // 2, NARROW, *(chunks * WINDOW for chunks in (1, MOST_CHUNKS // 4, MOST_CHUNKS)))
    shapes = product(widths, (512, 1024, 4096), (CLUSTER, LARGE_BLOCKS))
    plans = {chosen for shape in shapes if (chosen := plan(*shape)) is not None}
    kernels = {}
    for each in plans:
        kernel = Kernel(build(bf16, each), each.shared_bytes)
        if not kernel.try_load("top-k runs in Triton"):
            return {}
        kernels[each] = kernel
    return kernels


@cache
def is_hopper(device: int) -> bool:
    """Whether the kernels in CUDA C++ run there."""
    return USES_CUDA_CPP and torch.cuda.get_device_capability(device) == (9, 0)


def parameters(scores: Tensor, k: int, row_k: Tensor | None, ends: Tensor | None, out: Tensor, chosen: Plan) -> _Params:
    """Arguments of the kernel."""
    aligned = scores.data_ptr() % 16 == 0 and scores.stride(0) * scores.element_size() % 16 == 0
    width, at_once = scores.shape[1], chosen.cluster * chosen.threads * VALUES
    return _Params(
        scores.data_ptr(), out.data_ptr(), *(None if t is None else t.data_ptr() for t in (row_k, ends)),
        scores.stride(0), width, k,
        width // 8 * 8 if aligned else 0, max(-(-width // at_once), 1), chosen.list, chosen.fine,
    )  # fmt: skip


def select_top_k(scores: Tensor, k: int, row_k: Tensor | None = None, ends: Tensor | None = None) -> Tensor | None:
    """Positions int32 [N, k] of the k largest of scores [N, width], ascending, -1 where there are fewer above -inf.

    scores float32 or BF16 with adjacent columns; row_k int64 [N]: so many of each row, at most k (k at most 4096); ends
    int32 [N]: where rows end, nothing behind is read. Of equal scores the first are taken; NaN is not. None where the
    kernel does not run: other cards than Hopper, no compiler, very wide rows.
    """
    n, width = scores.shape
    if not scores.is_cuda or not is_hopper(scores.device.index) or scores.dtype not in (torch.float32, torch.bfloat16):
        return None
    chosen = plan(width, k, blocks_of_a_row(n, width))
    if chosen is None or scores.stride(1) != 1:
        return None
    kernels = _kernels(scores.dtype is torch.bfloat16, scores.device.index)
    if not kernels:
        return None
    out = torch.empty(n, k, dtype=torch.int32, device=scores.device)
    if n:
        arguments = parameters(scores, k, row_k, ends, out, chosen)
        kernels[chosen].launch((chosen.cluster, n, 1), (chosen.threads, 1, 1), arguments, starts_early=True)
    return out
