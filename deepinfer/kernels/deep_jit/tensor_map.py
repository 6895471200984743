"""Tensor maps: what Hopper's bulk copy engine (TMA) is told of a tensor in global memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit.driver import call

# Values of the CUDA driver's enumerations (cuda.h).
_TYPES = {
    torch.uint8: 0,
    torch.int8: 0,
    torch.float8_e4m3fn: 0,
    torch.int32: 3,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes of a row
_PROMOTE_256_BYTES = 3


class TensorMap(ctypes.Structure):
    """A CUtensorMap, passed to a kernel by value (a __grid_constant__ argument aligned to 64 bytes)."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


def tensor_map(tensor: Tensor, box: Sequence[int], swizzle: int = 128) -> TensorMap:
    """The descriptor of copies of `box` elements, one size a dimension; zeros outside the tensor.

    Coordinates in the kernel run from the last dimension to the first. Rows of `swizzle` bytes (0, 32, 64 or 128) are
    swizzled in shared memory. Raises ValueError for a tensor that the copy engine does not take: up to 5 dimensions,
    the last one contiguous, start and other strides at multiples of 16 bytes.
    """
    size, last = tensor.element_size(), tensor.dim() - 1
    if tensor.dtype not in _TYPES or not 0 <= last <= 4 or (tensor.shape[last] > 1 and tensor.stride(last) != 1):
        raise ValueError(f"tensor must have a contiguous last dimension and one of {list(_TYPES)}, got {tensor.dtype}")
    if len(box) != tensor.dim() or swizzle not in _SWIZZLES:
        raise ValueError(f"box needs {tensor.dim()} sizes and swizzle one of {list(_SWIZZLES)}")
    row_bytes = -(-tensor.shape[last] * size // 16) * 16  # a stride that is never used may be anything
    strides = [tensor.stride(i) * size if tensor.shape[i] > 1 else row_bytes for i in reversed(range(last))]
    if tensor.data_ptr() % 16 or any(stride % 16 for stride in strides):
        raise ValueError(f"tensor must start and repeat at multiples of 16 bytes, strides are {tensor.stride()}")
    return _encode(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(strides), tuple(box), swizzle)


@lru_cache(maxsize=4096)
def _encode(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> TensorMap:
    memory = ctypes.create_string_buffer(192)  # the driver writes at a multiple of 64 bytes
    start = -(-ctypes.addressof(memory) // 64) * 64
    rank = len(shape)
    call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(start),
        _TYPES[dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # no interleaving
        _SWIZZLES[swizzle],
        _PROMOTE_256_BYTES,
        0,  # zeros outside
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(start, 128))
