"""Tensor maps: what the bulk copy engine is told of a matrix in global memory."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit import driver

# Values of the CUDA driver's enumerations (cuda.h).
_DTYPES = {torch.uint8: 0, torch.float8_e4m3fn: 0, torch.int8: 0, torch.float32: 7, torch.bfloat16: 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTION_256_BYTES = 3


class TensorMap(ctypes.Structure):
    """A CUtensorMap, passed to a kernel by value."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


def tensor_map(matrix: Tensor, box: tuple[int, int], swizzle: int) -> TensorMap:
    """Boxes of `box` (rows, columns) of a matrix [rows, columns] with contiguous columns; zeros outside it.

    `swizzle` (0, 32, 64, 128) is the width in bytes of the shared-memory pattern. Raises ValueError for a matrix that
    the copy engine does not take: a start or row stride that is no multiple of 16 bytes, columns not contiguous.
    """
    if matrix.dim() != 2 or (matrix.shape[1] > 1 and matrix.stride(1) != 1):
        raise ValueError(f"matrix must be 2-dimensional with contiguous columns, got strides {matrix.stride()}")
    size = matrix.element_size()
    row_bytes = matrix.stride(0) * size if matrix.shape[0] > 1 else -(-matrix.shape[1] * size // 16) * 16
    if matrix.data_ptr() % 16 or row_bytes % 16:
        raise ValueError(f"matrix must start at, and its rows be apart, a multiple of 16 bytes, got {row_bytes}")
    return _encode(matrix.data_ptr(), matrix.dtype, tuple(matrix.shape), row_bytes, box, swizzle)


@lru_cache(maxsize=4096)
def _encode(
    address: int, dtype: torch.dtype, shape: tuple[int, int], row_bytes: int, box: tuple[int, int], swizzle: int
) -> TensorMap:
    memory = ctypes.create_string_buffer(192)  # the driver writes at a multiple of 64 bytes
    start = -(-ctypes.addressof(memory) // 64) * 64
    driver.call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(start),
        _DTYPES[dtype],
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(shape[1], shape[0]),
        (ctypes.c_uint64 * 1)(row_bytes),
        (ctypes.c_uint32 * 2)(box[1], box[0]),
        (ctypes.c_uint32 * 2)(1, 1),
        0,  # no interleaving
        _SWIZZLES[swizzle],
        _L2_PROMOTION_256_BYTES,
        0,  # zeros outside
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(start, 128))
