"""A CUDA C++ kernel of two small files, for the tests of run-time compilation."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.kernels.deep_jit import CompileError
from deepinfer.kernels.deep_jit.compilers import find_compiler

SCALE = """
#include "factor.cuh"
extern "C" __global__ void scale(float* x) { x[blockIdx.x * WIDTH + threadIdx.x] *= FACTOR; }
"""


def has_compiler() -> bool:
    try:
        return bool(find_compiler())
    except CompileError:
        return False


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="neither NVRTC nor nvcc here")


def write_scale(folder: Path) -> Path:
    """Write the kernel and its header into a folder; its source."""
    (folder / "factor.cuh").write_text("#pragma once\n#define FACTOR 2.0f\n")
    source = folder / "scale.cu"
    source.write_text(SCALE)
    return source
