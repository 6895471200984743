"""BF16 and FP8 x FP8 products, dense or grouped (contiguous or masked), swapped so that few rows of x waste little."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm.checks import check, check_out
from deepinfer.kernels.deep_gemm.fp8_gemm import processors, row_scales_layout
from deepinfer.kernels.deep_jit import Build, Kernel
from deepinfer.kernels.deep_jit.tensor_map import tensor_map

SOURCE = Path(__file__).parent / "group_gemm.cu"
MAX_GROUPS = 1024
SHARED_BYTES = 232_448  # of a block on Hopper
THREADS = 384
FEW_ROWS = 32  # of x in a group on average, up to which weights are taken 128 rows at a time


class _Params(ctypes.Structure):
    _fields_ = [
        ("w_scales", ctypes.c_void_p),
        ("begins", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("tokens", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("row_blocks", ctypes.c_int),
        ("k_blocks", ctypes.c_int),
        ("columns", ctypes.c_int),
    ]


@dataclass(frozen=True)
class _Variant:
    """BF16, or FP8 with a scale for 128 x 128 weights or one a row; for few rows of x a group or for many."""

    bf16: bool
    row_scales: bool
    few: bool

    @property
    def rows(self) -> int:
        return 128 if self.few else 256

    @property
    def tokens(self) -> int:
        return 32 if self.few else 128

    def build(self) -> Build:
        """What to compile."""
        defines: dict[str, int | str] = {
            "BF16": int(self.bf16),
            "ROW_SCALES": int(self.row_scales),
            "ROWS": self.rows,
            "MAX_TOKENS": self.tokens,
            "STAGES": 9 if self.few else 4,
        }
        return Build("group_gemm", SOURCE, defines)


def builds() -> list[Build]:
    """BF16 and both kinds of FP8, for few rows and for many."""
    kinds = ((True, False), (False, False), (False, True))
    return [_Variant(*kind, few).build() for kind in kinds for few in (True, False)]


@cache
def _kernel(variant: _Variant) -> Kernel:
    return Kernel(variant.build(), SHARED_BYTES)


def grouped_bf16_gemm(x: Tensor, begins: Tensor, counts: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows begins[g] .. begins[g] + counts[g] of x [P, K] times w[g] [N, K]^T -> the same rows of out [P, N], all BF16.

    w [G, N, K]; begins and counts int32 [G], nothing is copied to the host. Contiguous groups follow one another,
    masked ones begin at multiples of their room: both are ranges of rows. Rows of no group are not written. Raises
    ValueError.
    """
    return _launch(x, None, begins, counts, w, None, out)


def bf16_gemm(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """x [M, K] w [N, K]^T -> [M, N], all BF16 with FP32 sums. Raises ValueError."""
    return _launch(x, None, None, None, w.unsqueeze(0), None, out)


def grouped_fp8_gemm(
    x: Tensor,
    x_scales: Tensor,
    begins: Tensor,
    counts: Tensor,
    w: Tensor,
    w_scales: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """`grouped_bf16_gemm` for x and w in E4M3. out is BF16.

    x_scales float32 [P, ceil(K / 128)]; w_scales float32 [G, ceil(N / 128), ceil(K / 128)], or one a row [G, N].
    Raises ValueError.
    """
    return _launch(x, x_scales, begins, counts, w, w_scales, out)


def _launch(
    x: Tensor,
    x_scales: Tensor | None,
    begins: Tensor | None,
    counts: Tensor | None,
    w: Tensor,
    w_scales: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    (p, k), (groups, n) = x.shape, w.shape[:2]
    dtype = torch.bfloat16 if x_scales is None else torch.float8_e4m3fn
    piece = 64 if x_scales is None else 128  # columns of 128 bytes
    k_blocks = -(-k // piece)
    if x.dtype != dtype or w.dtype != dtype or w.shape[2] != k or k == 0 or not w.is_contiguous():
        raise ValueError(f"x [P, K > 0] and w [G, N, K] must be {dtype}, w contiguous, got {x.dtype} and {w.dtype}")
    for name, table in (("begins", begins), ("counts", counts)):
        if table is not None:
            check(name, table, torch.int32, [groups], x)
    if groups > MAX_GROUPS:
        raise ValueError(f"at most {MAX_GROUPS} groups, got {groups}")
    if x_scales is not None and (list(x_scales.shape) != [p, k_blocks] or x_scales.dtype != torch.float32):
        raise ValueError(f"x_scales must be float32 [{p}, {k_blocks}], got {x_scales.dtype} {list(x_scales.shape)}")
    by_row = w_scales is not None and w_scales.dim() == 2
    expected = [groups, n] if by_row else [groups, -(-n // 128), k_blocks]
    if w_scales is not None:
        check("w_scales", w_scales, torch.float32, expected, x)
    if out is None:
        out = torch.empty(p, n, dtype=torch.bfloat16, device=x.device)
    check_out(out, (p, n), x)
    if p == 0 or groups == 0:
        return out
    cards = processors(x.device.index)
    large_tiles = -(-n // 256) * -(-p // 128)
    few = p <= FEW_ROWS * groups or (groups == 1 and large_tiles < cards // 2)
    variant = _Variant(dtype == torch.bfloat16, by_row, few)
    params = _Params(
        w_scales=None if w_scales is None else w_scales.data_ptr(),
        begins=None if begins is None else begins.data_ptr(),
        counts=None if counts is None else counts.data_ptr(),
        out=out.data_ptr(),
        out_stride=out.stride(0) * 2,
        tokens=p,
        groups=groups,
        row_blocks=-(-n // variant.rows),
        k_blocks=k_blocks,
        columns=n,
    )
    x_map = tensor_map(x, (16, piece), 128)
    scale_map = x_map if x_scales is None else tensor_map(row_scales_layout(x_scales).T, (1, variant.tokens), 0)
    w_map = tensor_map(w.flatten(0, 1), (variant.rows, piece), 128)
    _kernel(variant).launch((cards, 1, 1), (THREADS, 1, 1), params, w_map, x_map, scale_map)
    return out
