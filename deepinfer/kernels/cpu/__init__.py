"""C kernels for the CPU, compiled on first use; without a compiler the PyTorch references run instead."""

from deepinfer.kernels.cpu import bitmask, caches, int8, layers, plan, speculation
from deepinfer.kernels.cpu.library import cpu_backend_status

__all__ = ["bitmask", "caches", "cpu_backend_status", "int8", "layers", "plan", "speculation"]
