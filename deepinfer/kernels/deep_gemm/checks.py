"""What a kernel reads through a plain pointer has to be: the GPU would take anything, and read past its end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int], beside: Tensor) -> None:
    """Raises ValueError unless `tensor` is contiguous, of this dtype and shape, and on the device of `beside`."""
    if tensor.dtype == dtype and list(tensor.shape) == list(shape) and tensor.is_contiguous():
        if tensor.device == beside.device:
            return
        raise ValueError(f"{name} must be on {beside.device}, got {tensor.device}")
    layout = "" if tensor.is_contiguous() else " with strides " + str(list(tensor.stride()))
    raise ValueError(
        f"{name} must be contiguous {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}{layout}"
    )


def check_out(out: Tensor, shape: Sequence[int], beside: Tensor) -> None:
    """Raises ValueError unless `out` is BF16 of this shape with rows that begin at multiples of 16 bytes."""
    rows, columns = shape
    if columns % 8 or list(out.shape) != [rows, columns] or out.dtype != torch.bfloat16 or out.device != beside.device:
        raise ValueError(
            f"out must be bfloat16 [{rows}, {columns}] on {beside.device} with columns a multiple of 8, "
            f"got {out.dtype} {list(out.shape)} on {out.device}"
        )
    if out.stride(1) != 1 or (rows > 1 and out.stride(0) % 8) or out.data_ptr() % 16:
        raise ValueError(f"rows of out must begin at multiples of 16 bytes, strides are {list(out.stride())}")
