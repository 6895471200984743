"""CUDA C++ compiled when first needed, for one shape and card, and kept on disk. Importing this compiles nothing.

    kernel = Kernel("sparse_attention", Path("attention.cu"), {"HEADS": 64}, shared_bytes=220_000)
    kernel.launch((grid, 1, 1), (384, 1, 1), params)  # params: a ctypes structure, or several ctypes values

`deepinfer kernels warmup` compiles what the engine may need ahead of time (warmup.py).
"""

from deepinfer.kernels.deep_jit.compilers import CompileError
from deepinfer.kernels.deep_jit.kernel import Build, Kernel

__all__ = ["Build", "CompileError", "Kernel"]
