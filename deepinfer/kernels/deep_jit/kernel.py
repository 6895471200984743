"""A CUDA kernel specialised by macros: compiled and loaded on first use, launched on PyTorch's current stream."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deepinfer.kernels.deep_jit import driver
from deepinfer.kernels.deep_jit.cache import is_kept, load_or_compile
from deepinfer.kernels.deep_jit.compilers import CompileError

logger = logging.getLogger(__name__)

Dim = tuple[int, int, int]


@dataclass(frozen=True)
class Build:
    """What to compile: function `name` (extern "C") of `source` with `defines`, for cards of `arch`."""

    name: str
    source: Path
    defines: dict[str, int | str] = field(default_factory=dict)
    arch: str = "sm_90a"

    def cubin(self) -> bytes:
        """Compiled code, from the disk cache if it is there. Raises CompileError."""
        return load_or_compile(self.source, self.defines, self.arch)

    @property
    def is_kept(self) -> bool:
        """Whether the compiled code is in the disk cache. Raises CompileError without a compiler."""
        return is_kept(self.source, self.defines, self.arch)


class Kernel:
    """A `Build` that can be launched; `shared_bytes` of dynamic shared memory a block."""

    def __init__(self, build: Build, shared_bytes: int = 0) -> None:
        self.build = build
        self.shared_bytes = shared_bytes
        self._functions: dict[int, ctypes.c_void_p] = {}  # by device: code is loaded into a context

    def load(self) -> ctypes.c_void_p:
        """The function on the current device. Raises CompileError or DriverError. Not while a graph is captured."""
        device = torch.cuda.current_device()
        if device not in self._functions:
            torch.cuda.current_stream().query()  # makes PyTorch's context current in this thread
            self._functions[device] = driver.load_function(self.build.cubin(), self.build.name, self.shared_bytes)
        return self._functions[device]

    def try_load(self, otherwise: str) -> bool:
        """Whether it compiles, and then load it. If not, a warning says what is done otherwise. Raises DriverError."""
        try:
            self.load()
        except CompileError as error:
            logger.warning("%s: %s", otherwise, error)
            return False
        return True

    def launch(
        self,
        grid: Dim,
        block: Dim,
        *arguments: ctypes._SimpleCData | ctypes.Structure | ctypes.Array,
        starts_early: bool = False,
        all_at_once: bool = False,
    ) -> None:
        """Launch on the current stream; may be captured in a CUDA graph once `load` has run. Raises DriverError.

        `starts_early`, `all_at_once`: see driver.launch.
        """
        function = self.load()
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        stream = torch.cuda.current_stream().cuda_stream
        driver.launch(function, grid, block, self.shared_bytes, stream, pointers, starts_early, all_at_once)
