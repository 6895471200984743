"""Compile every Triton kernel for sm_90 on a machine without a GPU: python -m tests.kernels.compile_for_hopper [names].

The operations' own wrappers run on CPU tensors with a driver that only names the target, and launches become
compilations. So the kernels are compiled with the argument types and constants that the wrappers choose.
"""

from __future__ import annotations

import sys

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


def main(names: list[str]) -> None:
    triton.runtime.driver.set_active(HopperDriver())
    compile_and_launch = JITFunction.run
    compiled: set[str] = set()

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = compile_and_launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.metadata.shared <= SHARED_MEMORY, (self.fn.__name__, kernel.metadata.shared)
        compiled.add(f"{self.fn.__module__}.{self.fn.__name__}")
        return kernel

    JITFunction.run = compile_only  # type: ignore[method-assign]
    import deepinfer.kernels.cuda  # noqa: F401  (registers the backends)
    from deepinfer.kernels.registry import OPERATIONS
    from tests.kernels.cases import CASES
    from tests.kernels.test_cuda_kernels import as_bf16

    for name in names or sorted(name for name, op in OPERATIONS.items() if "cuda" in op.backends):
        for case in CASES[name](torch.Generator().manual_seed(0)):
            for variant in (case, as_bf16(name, case)):
                OPERATIONS[name].backends["cuda"](*variant)
    print("\n".join(sorted(compiled)))


if __name__ == "__main__":
    main(sys.argv[1:])
