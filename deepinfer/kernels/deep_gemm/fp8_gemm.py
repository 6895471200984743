"""Dense FP8 x FP8 matrix product with fine-grained scales."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from deepinfer.kernels.deep_gemm.checks import check, check_out
from deepinfer.kernels.deep_gemm.fp8_variants import THREADS, Tile, choose_tile
from deepinfer.kernels.deep_jit import Kernel
from deepinfer.kernels.deep_jit.tensor_map import tensor_map

GROUP = 128  # columns of A, rows and columns of B, that have one scale


class _Params(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_void_p),
        ("b_scales", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
    ]


@cache
def _kernel(tile: Tile, b_row_scales: bool) -> Kernel:
    return Kernel(tile.build(b_row_scales), tile.shared_bytes)


@cache
def processors(device: int) -> int:
    """Multiprocessors of a card."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def row_scales_layout(scales: Tensor) -> Tensor:
    """Scales [M, G] laid out with M contiguous and padded to a multiple of 4, as the kernels read them; same values."""
    if scales.stride(0) == 1 and scales.stride(1) % 4 == 0 and scales.data_ptr() % 16 == 0:
        return scales
    m, groups = scales.shape
    laid_out = scales.new_empty(groups, -(-m // 4) * 4)[:, :m].T
    return laid_out.copy_(scales)


def fp8_gemm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    out: Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """a [M, K] x b [N, K]^T -> BF16 [M, N], both E4M3 with scales in float32, on Hopper.

    a_scales [M, ceil(K / 128)], one for 1 x 128 values (fastest in the layout of `row_scales_layout`); b_scales either
    [ceil(N / 128), ceil(K / 128)], one for 128 x 128, or [N], one a row. N must be a multiple of 8; rows of a, b and
    out must start at multiples of 16 bytes. Sums of 128 products come from the tensor cores, sums of those are FP32.
    Raises ValueError for shapes and layouts that do not fit.
    """
    (m, k), n = a.shape, b.shape[0]
    k_blocks = -(-k // GROUP)
    by_row = b_scales.dim() == 1
    if b.shape[1] != k or a.dtype != torch.float8_e4m3fn or b.dtype != torch.float8_e4m3fn:
        raise ValueError(f"a and b must be float8_e4m3fn [M, K] and [N, K], got {list(a.shape)} and {list(b.shape)}")
    expected = [n] if by_row else [-(-n // GROUP), k_blocks]
    if list(a_scales.shape) != [m, k_blocks] or a_scales.dtype != torch.float32:
        raise ValueError(f"a_scales must be float32 [{m}, {k_blocks}], got {a_scales.dtype} {list(a_scales.shape)}")
    check("b_scales", b_scales, torch.float32, expected, a)
    if out is None:
        out = torch.empty(m, n, dtype=torch.bfloat16, device=a.device)
    check_out(out, (m, n), a)
    if m == 0 or n == 0:
        return out
    if k == 0:
        return out.zero_()
    cards = processors(a.device.index)
    tile = tile or choose_tile(m, n, k, cards)
    part_a, part_b = (tile.m // 2 if tile.share == "a" else tile.m), (tile.n // 2 if tile.share == "b" else tile.n)
    rows, columns = (tile.m * (1 + (tile.share == "b")), tile.n * (1 + (tile.share == "a")))
    clusters = -(-m // rows) * -(-n // columns)
    if tile.k_parts == 1:  # else one tile a cluster
        clusters = min(clusters, cards // tile.cluster)
    params = _Params(out.data_ptr(), b_scales.data_ptr(), out.stride(0) * 2, m, n, k)
    _kernel(tile, by_row).launch(
        (clusters * tile.cluster * tile.k_parts, 1, 1),
        (THREADS, 1, 1),
        params,
        tensor_map(a, (part_a, 128), 128),
        tensor_map(b, (part_b, 128), 128),
        tensor_map(row_scales_layout(a_scales).T, (1, part_a), 0),
        tensor_map(out, (16, 32), 64),
    )
    return out
