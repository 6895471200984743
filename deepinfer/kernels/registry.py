"""One registry for kernels: an operation has one name, one PyTorch reference and at most one backend a device type.

    @operation                      # in kernels/reference: defines the operation and its reference
    def rms_norm(x, weight, eps): ...

    @backend("rms_norm", "cpu")     # in kernels/cpu, kernels/cuda: registers a faster version for tensors there
    def rms_norm_c(x, weight, eps): ...

Calling the operation picks the backend of the first tensor's device. A backend that does not cover a case (a dtype, a
format) returns NotImplemented and the reference runs. `DEEPINFER_KERNELS=reference` switches every backend off,
`DEEPINFER_KERNELS=triton` those in CUDA C++, and `=tilelang` puts the portable ones in the place of both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deepinfer import envs

FORCE_REFERENCE = envs.get("DEEPINFER_KERNELS") == "reference"
USES_TILELANG = envs.get("DEEPINFER_KERNELS") == "tilelang"
USES_CUDA_CPP = envs.get("DEEPINFER_KERNELS") == "auto"


class Operation:
    """A named operation; callable like its reference."""

    def __init__(self, reference: Callable[..., Any]) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.backends: dict[str, Callable[..., Any]] = {}
        self.__doc__ = reference.__doc__

    def __call__(self, *args: Any) -> Any:
        if self.backends and not FORCE_REFERENCE:
            for argument in args:
                if isinstance(argument, Tensor):
                    implementation = self.backends.get(argument.device.type)
                    if implementation is not None:
                        result = implementation(*args)
                        if result is not NotImplemented:
                            return result
                    break
        return self.reference(*args)


OPERATIONS: dict[str, Operation] = {}


def operation(reference: Callable[..., Any]) -> Operation:
    """Define an operation by its PyTorch reference."""
    op = Operation(reference)
    if op.name in OPERATIONS:
        raise ValueError(f"operation {op.name!r} is defined twice")
    OPERATIONS[op.name] = op
    return op


def backend(name: str, device: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an implementation of operation `name` for tensors on `device` ('cpu', 'cuda', 'npu')."""

    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        if name not in OPERATIONS:
            raise ValueError(f"no operation {name!r}; known: {sorted(OPERATIONS)}")
        OPERATIONS[name].backends[device] = implementation
        return implementation

    return register


@cache
def keep_from_compiler(device: str) -> None:
    """Let torch.compile call the backends of a device as they are, for good.

    Traced, a kernel's temporary ends with the last line that names it, and the kernel is given the address behind that.
    """
    for op in OPERATIONS.values():
        if device in op.backends:
            op.backends[device] = torch.compiler.disable(op.backends[device])
