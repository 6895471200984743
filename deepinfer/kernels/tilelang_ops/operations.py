"""Operations on TileLang kernels: what all of `calls` share, and their registration as backends.

`register` makes these the backends of a device: on Ascend they are the only ones, on a GPU DEEPINFER_KERNELS=tilelang
asks for them instead of Triton and CUDA C++.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.reference.cache_rows import RowFormat
from deepinfer.kernels.registry import OPERATIONS

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
FORMATS = {
    RowFormat.FP8: ("e4m3", "ue8m0", 32), RowFormat.MXFP4: ("e2m1", "ue8m0", 32), RowFormat.NVFP4: ("e2m1", "e4m3", 16),
}  # fmt: skip
CALLS: dict[str, Callable[..., Any]] = {}


@cache
def compiled(name: str, sizes: tuple[Any, ...]) -> Callable[..., None]:
    """The kernel of factory `name` for `sizes`, compiled for this platform's device."""
    from deepinfer.kernels import tilelang_ops  # needs TileLang

    return tilelang_ops.compiled(getattr(tilelang_ops, name)(*sizes))


def launch(name: str, sizes: tuple[Any, ...], *tensors: Tensor) -> None:
    """Run factory `name`'s kernel on inputs and then outputs; nothing to do without rows."""
    if all(t.numel() for t in tensors[-1:]):
        compiled(name, sizes)(*tensors)


def call(function: Callable[..., Any]) -> Callable[..., Any]:
    CALLS[function.__name__] = function
    return function


def register(device: str) -> None:
    """Make these the backends of `device`."""
    for name, function in CALLS.items():
        OPERATIONS[name].backends[device] = function


def covered(*tensors: Tensor) -> bool:
    """Of one dtype that the kernels take."""
    return tensors[0].dtype in DTYPES and all(t.dtype is tensors[0].dtype for t in tensors)


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def number_dtype(like: Tensor) -> torch.dtype:
    """Of sums of weights and of times: vector cores of Ascend have nothing wider than float32."""
    return torch.float32 if like.device.type == "npu" else torch.float64
