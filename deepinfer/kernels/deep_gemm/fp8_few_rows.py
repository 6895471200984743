"""FP8 product of few rows, as decode steps have: the weights stream through all processors once."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm.fp8_gemm import processors, row_scales_layout
from deepinfer.kernels.deep_gemm.tensor_map import tensor_map
from deepinfer.kernels.deep_jit import Build, Kernel

SOURCE = Path(__file__).parent / "fp8_few_rows.cu"
ROWS = 64  # of the weight, a block
TOKENS = (8, 16, 32, 64)
K_PARTS = (1, 2, 3, 4, 5, 6, 7, 8)
BLOCKS = 2  # on a processor
SHARED_BYTES = 110_000  # of one of them
STAGES = 12  # at most
REST = 3  # what a block costs beside its products, in products of 128 columns


class _Params(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_void_p),
        ("w_scales", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
    ]


def _stage_bytes(tokens: int) -> int:
    return ROWS * 128 + tokens * 128 + max(tokens * 4, 128) + 16


def _stages(tokens: int) -> int:
    return min(STAGES, SHARED_BYTES // _stage_bytes(tokens))


def build(tokens: int, k_parts: int) -> Build:
    """What to compile."""
    return Build("fp8_few_rows", SOURCE, {"TOKENS": tokens, "K_PARTS": k_parts, "STAGES": _stages(tokens)})


def builds() -> list[Build]:
    """What the linears of V4.1-Flash take."""
    shapes = ((1792, 5120), (32768, 1280), (5120, 8192), (4608, 5120), (5120, 2304), (4096, 1280), (25600, 6144))
    parts = {choose_k_parts(n, k, 132) for n, k in shapes}
    return [build(tokens, k_parts) for tokens in TOKENS for k_parts in sorted(parts)]


@cache
def _kernel(tokens: int, k_parts: int) -> Kernel:
    return Kernel(build(tokens, k_parts), _stages(tokens) * _stage_bytes(tokens))


@lru_cache(maxsize=4096)
def choose_k_parts(n: int, k: int, processors: int) -> int:
    """Into how many parts the columns are divided: rounds of blocks times the length of one."""
    k_blocks = -(-k // 128)

    def cost(parts: int) -> int:
        rounds = -(-(-(-n // ROWS) * parts) // (processors * BLOCKS // parts * parts))
        return rounds * (-(-k_blocks // parts) + REST)

    return min(K_PARTS, key=cost)


def fp8_few_rows(
    x: Tensor, x_scales: Tensor, w: Tensor, w_scales: Tensor, k_parts: int | None = None, starts_early: bool = True
) -> Tensor:
    """`fp8_gemm` for up to 64 rows: x E4M3 [M, K], w E4M3 [N, K], w_scales float32 [N] -> BF16 [M, N].

    x_scales float32 [M, ceil(K / 128)]. With `starts_early` the kernel before on the stream must be `quantize_rows`, or
    one that does not let this one start. A row of the result does not depend on the other rows. Raises ValueError.
    """
    (m, k), n = x.shape, w.shape[0]
    if not 0 < m <= TOKENS[-1] or n % 8 or w.shape[1] != k or k == 0:
        raise ValueError(f"x must be [1 to {TOKENS[-1]}, K > 0] and w [N, K], N % 8 == 0, got {x.shape} and {w.shape}")
    if x.dtype != torch.float8_e4m3fn or w.dtype != torch.float8_e4m3fn or list(w_scales.shape) != [n]:
        raise ValueError(f"x and w must be float8_e4m3fn and w_scales [{n}], got {x.dtype} and {list(w_scales.shape)}")
    if list(x_scales.shape) != [m, -(-k // 128)] or x_scales.dtype != torch.float32:
        raise ValueError(f"x_scales must be float32 [{m}, {-(-k // 128)}], got {list(x_scales.shape)}")
    tokens = next(t for t in TOKENS if t >= m)
    parts = k_parts or choose_k_parts(n, k, processors(x.device.index))
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    _kernel(tokens, parts).launch(
        (-(-n // ROWS) * parts, 1, 1),
        (160, 1, 1),
        _Params(out.data_ptr(), w_scales.data_ptr(), out.stride(0) * 2, m, n, k),
        tensor_map(w, (ROWS, 128), 128),
        tensor_map(x, (tokens, 128), 128),
        tensor_map(row_scales_layout(x_scales).T, (1, tokens), 0),
        starts_early=starts_early,
    )
    return out
