"""Compile the CUDA C++ that TileLang makes for sm_90a without a GPU or the CUDA toolkit: NVRTC, headers from wheels."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import tilelang

from deepinfer.kernels.deep_jit.compilers import find_compiler


def cuda_headers() -> list[Path]:
    """Folders of CUDA's headers and of libcu++: of the wheels, else of a toolkit."""
    wheels = [Path(folder) / "nvidia/cu13/include" for folder in sys.path]
    for folder in (*wheels, Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"):
        if (folder / "cuda_bf16.h").exists():
            return [folder, folder / "cccl"]
    raise FileNotFoundError("no CUDA headers: install nvidia-cuda-runtime, nvidia-cuda-cccl and nvidia-cuda-crt")


def compile_for_hopper(source: str, folder: Path) -> bytes:
    """The cubin of `tilelang_ops.source(..., "cuda")`. Raises CompileError with the compiler's log."""
    path, package = folder / "kernel.cu", Path(tilelang.__file__).parent
    path.write_text("#include <tl_templates/cuda/nvrtc_std.h>\n" + source)
    includes = [package / "src", package / "3rdparty/cutlass/include", *cuda_headers()]
    options = ["-std=c++17", "-arch=sm_90a", "-default-device", "-DENABLE_BF16", "-w"]
    return find_compiler().compile(path, [*options, *(f"-I{include}" for include in includes)])
