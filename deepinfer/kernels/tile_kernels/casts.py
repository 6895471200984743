"""Casts of BF16 rows to E4M3 at the speed of memory: launches casts.cu and fused_casts.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit import Build, Kernel
from deepinfer.kernels.deep_select.top_k import is_hopper

VECTOR = 8  # values of a load
THREADS, SWIGLU_THREADS = 256, 128  # of a block
STRIPS, FEW_ROWS = (128, 64, 32), 128  # columns of a block or cluster with a scale for each; the widest of few rows
CLUSTER, STRIP_ROWS = 8, 512  # blocks of a cluster, and most rows of one
SHARED_BYTES = 4096  # at least what any kernel here lays out
GROUP = 32  # values with a scale behind another operation
LARGEST_GRID = 65535
MOST_VECTORS = 1 << 31


class CastParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales")),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("lines", "rows", "width", "height")),
    ]


class FusedParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "cos", "sin", "codes", "scales")),
        ("stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("value", ctypes.c_float),
    ]


def _build(name: str, file: str, **defines: int) -> Build:
    return Build(name, Path(__file__).parent / file, {"CLUSTER": 1, "UE8M0": 1, **defines})


def lines_build(width: int, group: int, ue8m0: bool) -> Build:
    """A scale for `group` adjacent values: 4 vectors a thread or fewer, 8 of long ones."""
    vectors = group // VECTOR
    lanes = min(1 << (vectors - 1).bit_length(), 32) if vectors <= 128 else 128 if vectors <= 1024 else 256
    threads = max(lanes, 128)
    blocks = 1536 // threads if vectors <= 8 * lanes else 1
    shape = {"GROUP": group, "LANES": lanes, "WIDTH": width, "THREADS": threads, "BLOCKS": blocks}
    return _build("cast_lines", "casts.cu", UE8M0=int(ue8m0), **shape)


def strip_of(height: int, columns: int, width: int) -> int:
    """Columns that a block or a cluster takes."""
    if columns > 1:
        return columns
    return next((strip for strip in STRIPS[height > FEW_ROWS :] if width % strip == 0), STRIPS[-1])


def tiles_build(strip: int, height: int, columns: int, ue8m0: bool) -> Build:
    """A scale for `height` rows and `columns` columns; columns 1: rows of one block or of a cluster's."""
    common = {"UE8M0": int(ue8m0), "COLUMNS": strip}
    if columns > 1:
        return _build("cast_tiles", "casts.cu", CHANNELS=0, ROWS=height, THREADS=THREADS, BLOCKS=4, **common)
    cluster = 1 if height <= STRIP_ROWS else CLUSTER
    threads = THREADS if height <= FEW_ROWS else 2 * THREADS
    at_once = threads * VECTOR // strip
    rows = -(-height // (cluster * at_once)) * at_once
    shape = {"ROWS": rows, "CLUSTER": cluster, "THREADS": threads, "BLOCKS": 1024 // threads}
    return _build("cast_channels", "casts.cu", CHANNELS=1, **shape, **common)


def norm_build(width: int) -> Build:
    return _build("norm_cast", "fused_casts.cu", WIDTH=width, THREADS=128, BLOCKS=8 if width <= 6144 else 1)


def swiglu_build(width: int) -> Build:
    return _build("swiglu_cast", "fused_casts.cu", WIDTH=width, THREADS=SWIGLU_THREADS, BLOCKS=10)


def rope_build(heads: int, dim: int, pairs: int) -> Build:
    shape = {"WIDTH": heads * dim, "HEAD": dim, "PAIRS": pairs}
    return _build("rope_cast", "fused_casts.cu", THREADS=THREADS, BLOCKS=5, **shape)


def builds() -> list[Build]:
    """What V4.1-Flash would launch: for `deepinfer kernels warmup`."""
    return [
        lines_build(5120, 5120, False), tiles_build(128, 128, 128, False), tiles_build(64, 4096, 1, False),
        norm_build(5120), swiglu_build(2304), rope_build(64, 512, 32),
    ]  # fmt: skip


@cache
def _kernel(build: Callable[..., Build], device: int, *arguments: int) -> Kernel | None:
    kernel = Kernel(build(*arguments), SHARED_BYTES)
    return kernel if kernel.try_load("casts run in Triton") else None


def _runs_on(x: Tensor) -> bool:
    return x.is_cuda and is_hopper(x.device.index)


def in_vectors(*tensors: Tensor) -> bool:
    """Whether these BF16 tensors, adjacent along their last dimension, may be read 16 bytes at a time."""
    return all(
        t.dtype is torch.bfloat16 and t.stride(-1) == 1 and t.data_ptr() % 16 == 0
        and all(stride % VECTOR == 0 for stride in t.stride()[:-1])
        for t in tensors
    )  # fmt: skip


def cast_parameters(x: Tensor, codes: Tensor, scales: Tensor, height: int) -> CastParams:
    pointers = x.data_ptr(), codes.data_ptr(), scales.data_ptr()
    return CastParams(*pointers, x.stride(0), scales.numel(), *x.shape, height)


def cast(x: Tensor, ue8m0: bool, height: int, columns: int) -> tuple[Tensor, Tensor] | None:
    """`cast_groups` of x [N, K] to E4M3 with float32 or UE8M0 scales of height x columns values.

    For groups of a row of 128 values and more, blocks of 64 x 64 and 128 x 128, and columns of up to 4,096 rows. None
    for others, for other types than BF16, rows at odd places, other cards than Hopper, and without a compiler.
    """
    n, width = x.shape
    strip = strip_of(height, columns, width)
    is_line = height == 1 and columns >= 128 and columns % VECTOR == 0 and columns <= 16384
    is_block = height == columns in (64, 128)
    is_channel = columns == 1 and 64 <= height <= CLUSTER * STRIP_ROWS
    if not (is_line or is_block or is_channel) or width % strip or not in_vectors(x) or not _runs_on(x):
        return None
    groups = -(-n // height)
    tiles = groups * (width // strip)
    if not 0 < tiles <= (LARGEST_GRID if height > 1 else MOST_VECTORS // columns):
        return None
    build, shape = (lines_build, (width,)) if is_line else (tiles_build, (strip, height))
    kernel = _kernel(build, x.device.index, *shape, columns, ue8m0)
    if kernel is None:
        return None
    codes = torch.empty(n, width, dtype=torch.uint8, device=x.device)
    kind = torch.uint8 if ue8m0 else torch.float32
    scales = torch.empty(groups, width // columns, dtype=kind, device=x.device)
    defines = kernel.build.defines
    threads, cluster = int(defines["THREADS"]), int(defines["CLUSTER"])
    grid = (-(-tiles * int(defines["LANES"]) // threads), 1, 1) if is_line else (cluster, tiles, 1)
    kernel.launch(grid, (threads, 1, 1), cast_parameters(x, codes, scales, height), starts_early=True)
    return codes, scales


def fused_parameters(
    x: Tensor, others: tuple[Tensor | None, Tensor | None, Tensor | None], outputs: tuple[Tensor, Tensor], value: float
) -> FusedParams:
    """others: weight of the norm, cos and sin of the rotation; value: epsilon, limit, or sign."""
    pointers = [None if t is None else t.data_ptr() for t in (x, *others, *outputs)]
    return FusedParams(*pointers, x.stride(0), x.stride(1), len(x), value)


def _launch_fused(
    kernel: Kernel | None,
    width: int,
    vectors_of_a_block: int,
    x: Tensor,
    others: tuple[Tensor | None, Tensor | None, Tensor | None],
    value: float,
) -> tuple[Tensor, Tensor] | None:
    vectors = len(x) * width // VECTOR
    if kernel is None or not 0 < vectors < MOST_VECTORS:
        return None
    outputs = tuple(torch.empty(len(x), w, dtype=torch.uint8, device=x.device) for w in (width, width // GROUP))
    threads = int(kernel.build.defines["THREADS"])
    grid = (-(-vectors // vectors_of_a_block), 1, 1)
    kernel.launch(grid, (threads, 1, 1), fused_parameters(x, others, outputs, value), starts_early=True)  # type: ignore[arg-type]
    return outputs  # type: ignore[return-value]


def norm_cast(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """`norm_cast` of x [N, K]; None as for `cast`."""
    width = x.shape[1]
    if width % GROUP or width > 16384 or not in_vectors(x, weight) or not _runs_on(x):
        return None
    kernel = _kernel(norm_build, x.device.index, width)
    return _launch_fused(kernel, width, width // VECTOR, x, (weight, None, None), eps)


def swiglu_cast(x: Tensor, limit: float) -> tuple[Tensor, Tensor] | None:
    """`swiglu_cast` of x [N, 2 I]; None as for `cast`."""
    width = x.shape[1] // 2
    if width % GROUP or not in_vectors(x) or not _runs_on(x):
        return None
    kernel = _kernel(swiglu_build, x.device.index, width)
    return _launch_fused(kernel, width, 2 * SWIGLU_THREADS, x, (None, None, None), limit)


def rope_cast(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> tuple[Tensor, Tensor] | None:
    """`rope_cast` of x [N, H, d], cos and sin float32 [N, pairs] contiguous; None as for `cast`."""
    _, heads, dim = x.shape
    pairs = cos.shape[1]
    if dim % GROUP or pairs % 4 or not in_vectors(x) or not _runs_on(x):
        return None
    kernel = _kernel(rope_build, x.device.index, heads, dim, pairs)
    return _launch_fused(kernel, heads * dim, 4 * THREADS, x, (None, cos, sin), sign)
