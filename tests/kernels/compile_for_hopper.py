"""Compile Triton kernels for sm_90 on a machine without a GPU.

python -m tests.kernels.compile_for_hopper [--all] [NAME ...]   names of operations, or `train`

The operations' own wrappers run on CPU tensors with a driver that only names the target, and launches become
compilations. So the kernels are compiled with the argument types and constants that the wrappers choose: each kernel
once for every combination of types and row formats, with --all for every case of the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class HopperDriver:
    """What the launcher asks of a driver before it has something to launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


SHARED_MEMORY = 232448  # bytes a program may have on an H200
FORMATS = ("KIND", "WINDOW", "LATENT", "HAS_LATENT")  # constants that choose what is read and how


def signature(args: tuple, kwargs: dict[str, Any]) -> tuple:
    types = tuple(a.dtype if isinstance(a, torch.Tensor) else type(a) for a in args)
    return types, tuple(kwargs.get(name) for name in FORMATS)


def compile_only(compiled: dict[str, set], everything: bool) -> None:
    """From here on a launch compiles its kernel, and notes its name in `compiled`."""
    triton.runtime.driver.set_active(HopperDriver())
    compile_and_launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        done, these = compiled.setdefault(f"{self.fn.__module__}.{self.fn.__name__}", set()), signature(args, kwargs)
        if these in done and not everything:
            return SimpleNamespace()
        done.add(these)
        kernel = compile_and_launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.metadata.shared <= SHARED_MEMORY, (self.fn.__name__, kernel.metadata.shared)
        return kernel

    JITFunction.run = run  # type: ignore[method-assign]


def train() -> None:
    """The kernels of training, at its model's sizes."""
    from deepinfer.train import triton_ops

    logits = torch.zeros(64, 4, 4, requires_grad=True)
    triton_ops.sinkhorn(logits, 20, 1e-6).sum().backward()
    triton_ops.top_k_mask(torch.zeros(4, 4096), 512)


def operation(name: str) -> None:
    """All cases of an operation's tests, in float32 and BF16."""
    from deepinfer.kernels.registry import OPERATIONS
    from tests.kernels.cases import CASES
    from tests.kernels.test_cuda_kernels import as_bf16

    for case in CASES[name](torch.Generator().manual_seed(0)):
        for variant in (case, as_bf16(name, case)):
            OPERATIONS[name].backends["cuda"](*variant)


def main(arguments: list[str]) -> None:
    import deepinfer.kernels.cuda  # noqa: F401  (registers the backends)
    from deepinfer.kernels.registry import OPERATIONS

    names = [name for name in arguments if name != "--all"]
    names = names or [*sorted(name for name, op in OPERATIONS.items() if "cuda" in op.backends), "train"]
    compiled: dict[str, set] = {}
    compile_only(compiled, everything="--all" in arguments)
    special: dict[str, Callable[[], None]] = {"train": train}
    for name in names:
        special[name]() if name in special else operation(name)
    print("\n".join(sorted(compiled)))


if __name__ == "__main__":
    main(sys.argv[1:])
