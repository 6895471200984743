"""Many FP8 rows out of a large table, to BF16: launches gather_rows.cu."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit import Build, Kernel
from deepinfer.kernels.deep_select.top_k import is_hopper

DIM, ROW_BYTES = 256, 264  # values of a row; with its scales
THREADS, WARPS, ROWS = 128, 4, 2


class _Params(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("table", "slots", "out")),
        ("count", ctypes.c_int),
        ("page_size", ctypes.c_int),
        ("page_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    ]


def build() -> Build:
    return Build("gather_rows", Path(__file__).parent / "gather_rows.cu", {"ROWS": ROWS, "CLUSTER": 1})


def builds() -> list[Build]:
    """What the engine launches for V4.1-Flash: for `deepinfer kernels warmup`."""
    return [build()]


@cache
def _kernel(device: int) -> Kernel | None:
    kernel = Kernel(build())
    return kernel if kernel.try_load("rows are gathered in Triton") else None


def parameters(table: Tensor, slots: Tensor, out: Tensor) -> _Params:
    """Arguments of the kernel: table uint8 [pages, page size, 264 and more], slots int64 contiguous."""
    pointers = table.data_ptr(), slots.data_ptr(), out.data_ptr()
    return _Params(*pointers, slots.numel(), table.shape[1], table.stride(0), table.stride(1))


def gather_rows(table: Tensor, slots: Tensor) -> Tensor | None:
    """`load_rows` of FP8 rows of 256 values -> BF16 [*slots.shape, 256]; a slot of -1 is 0.

    None where the kernel does not run: other cards than Hopper, no compiler, rows that are not 8 bytes aligned.
    """
    aligned = all(at % 8 == 0 for at in (table.data_ptr(), table.stride(0), table.stride(1)))
    if not aligned or not slots.numel() or not table.is_cuda or not is_hopper(table.device.index):
        return None
    kernel = _kernel(table.device.index)
    if kernel is None:
        return None
    out = torch.empty(*slots.shape, DIM, dtype=torch.bfloat16, device=table.device)
    blocks = -(-slots.numel() // (ROWS * WARPS))
    kernel.launch((blocks, 1, 1), (THREADS, 1, 1), parameters(table, slots, out), starts_early=True)
    return out
