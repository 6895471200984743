"""FP8 product of few rows, as decode steps have: the weights stream through all processors once."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm.checks import check
from deepinfer.kernels.deep_gemm.fp8_gemm import processors, row_scales_layout
from deepinfer.kernels.deep_jit import Build, Kernel
from deepinfer.kernels.deep_jit.tensor_map import tensor_map

SOURCE = Path(__file__).parent / "fp8_few_rows.cu"
ROWS = 128  # of the weight, a tile
TOKENS = (8, 16, 32, 64, 128)
SHARED_BYTES = 232_448  # of a block on Hopper
THREADS = 256 + 32


class _Params(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_void_p),
        ("w_scales", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
    ]


def _stage_bytes(tokens: int) -> int:
    return ROWS * 128 + tokens * 128 + max(tokens * 4, 128) + 16


def _stages(tokens: int) -> int:
    return SHARED_BYTES // _stage_bytes(tokens)


def build(tokens: int, block_scales: bool) -> Build:
    """What to compile."""
    defines = {"TOKENS": tokens, "BLOCK_SCALES": int(block_scales), "STAGES": _stages(tokens)}
    return Build("fp8_few_rows", SOURCE, dict(defines))


def builds() -> list[Build]:
    """One for each number of rows that they are padded to, and each kind of weight scales."""
    return [build(tokens, block_scales) for tokens in TOKENS for block_scales in (False, True)]


@cache
def _kernel(tokens: int, block_scales: bool) -> Kernel:
    return Kernel(build(tokens, block_scales), _stages(tokens) * _stage_bytes(tokens))


@cache
def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums that blocks leave for others, and their flags. One for a device: launches must follow one another there.

    To be made before a CUDA graph is captured: the flags have to be zero.
    """
    blocks = processors(device.index)
    sums = torch.empty(blocks, ROWS * TOKENS[-1], device=device)
    return sums, torch.zeros(blocks, dtype=torch.int32, device=device)


def fp8_few_rows(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    out: Tensor | None = None,
    *,
    blocks: int | None = None,
    starts_early: bool = True,
) -> Tensor:
    """`fp8_gemm` for up to 128 rows: x E4M3 [M, K], w E4M3 [N, K] -> BF16 [M, N].

    x_scales float32 [M, ceil(K / 128)], w_scales float32 [N] or [ceil(N / 128), ceil(K / 128)]. `blocks` divide the
    work, at most one a processor. With `starts_early` the kernel before on the stream must be `quantize_rows`, or one
    that does not let this one start. A row of the result does not depend on the other rows. Raises ValueError.
    """
    (m, k), n = x.shape, w.shape[0]
    if not 0 < m <= TOKENS[-1] or n % 8 or w.shape[1] != k or k == 0:
        raise ValueError(f"x must be [1 to {TOKENS[-1]}, K > 0] and w [N, K], N % 8 == 0, got {x.shape} and {w.shape}")
    k_blocks, by_block = -(-k // 128), w_scales.dim() == 2
    if x.dtype != torch.float8_e4m3fn or w.dtype != torch.float8_e4m3fn:
        raise ValueError(f"x and w must be float8_e4m3fn, got {x.dtype} and {w.dtype}")
    expected = [-(-n // 128), k_blocks] if by_block else [n]
    check("w_scales", w_scales, torch.float32, expected, x)
    if list(x_scales.shape) != [m, k_blocks] or x_scales.dtype != torch.float32:
        raise ValueError(f"x_scales must be float32 [{m}, {k_blocks}], got {list(x_scales.shape)}")
    if out is None:
        out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    if list(out.shape) != [m, n] or out.dtype != torch.bfloat16 or out.stride(1) != 1:
        raise ValueError(f"out must be bfloat16 [{m}, {n}] with contiguous rows, got {out.dtype} {list(out.shape)}")
    tokens = next(t for t in TOKENS if t >= m)
    most = min(processors(x.device.index), -(-n // ROWS) * k_blocks)
    sums, flags = workspace(x.device)
    pointers = (out.data_ptr(), w_scales.data_ptr(), sums.data_ptr(), flags.data_ptr())
    _kernel(tokens, by_block).launch(
        (min(blocks or most, most), 1, 1),
        (THREADS, 1, 1),
        _Params(*pointers, out.stride(0) * 2, m, n, k),
        tensor_map(w, (ROWS, 128), 128),
        tensor_map(x, (tokens, 128), 128),
        tensor_map(row_scales_layout(x_scales).T, (1, tokens), 0),
        starts_early=starts_early,
    )
    return out
