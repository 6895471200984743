"""Descriptors of Hopper's bulk tensor copies (TMA): where a tensor lies, and the box that one copy moves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.kernels.deep_jit.driver import call

BYTES = 128  # of a descriptor
_ALIGNMENT = 64
_TYPES = {  # CU_TENSOR_MAP_DATA_TYPE_*
    torch.uint8: 0,
    torch.float8_e4m3fn: 0,
    torch.int32: 3,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes of a row -> CU_TENSOR_MAP_SWIZZLE_*
_PROMOTE_256_BYTES = 3

TensorMap = ctypes.Array[ctypes.c_uint8]


def tensor_map(tensor: Tensor, box: Sequence[int], swizzle: int = 128) -> TensorMap:
    """The descriptor of a copy of `box` elements (one a dimension), to pass by value as a __grid_constant__ argument.

    Coordinates in the kernel run from the last dimension to the first. Rows of `swizzle` bytes (0, 32, 64 or 128) are
    swizzled in shared memory; what lies outside the tensor reads as 0. Raises ValueError for a tensor that cannot be
    described: up to 5 dimensions, the last one contiguous, the others at multiples of 16 bytes.
    """
    size = tensor.element_size()
    strides = [tensor.stride(i) * size for i in reversed(range(tensor.dim() - 1))]
    if tensor.dtype not in _TYPES or not 1 <= tensor.dim() <= 5 or tensor.stride(-1) != 1:
        raise ValueError(f"tensor must have a contiguous last dimension and one of {list(_TYPES)}, got {tensor.dtype}")
    if tensor.data_ptr() % 16 or any(stride % 16 for stride in strides):
        raise ValueError(f"tensor must start and repeat at multiples of 16 bytes, strides are {tensor.stride()}")
    if len(box) != tensor.dim() or swizzle not in _SWIZZLES:
        raise ValueError(f"box needs {tensor.dim()} sizes and swizzle one of {list(_SWIZZLES)}")
    memory = bytearray(BYTES + _ALIGNMENT)
    start = -ctypes.addressof(ctypes.c_uint8.from_buffer(memory)) % _ALIGNMENT
    result = (ctypes.c_uint8 * BYTES).from_buffer(memory, start)
    rank = tensor.dim()
    call(
        "cuTensorMapEncodeTiled",
        ctypes.byref(result),
        _TYPES[tensor.dtype],
        rank,
        ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * rank)(*reversed(tensor.shape)),
        (ctypes.c_uint64 * (rank - 1))(*(stride or 16 for stride in strides)),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        _SWIZZLES[swizzle],
        _PROMOTE_256_BYTES,
        0,
    )
    return result
