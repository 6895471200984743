"""Compiles kernels for the CPU: their sources over hopper_on_host.cuh, which imitates the card's instructions."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from deepinfer.kernels.deep_jit import Build

COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
HERE = Path(__file__).parent


def copy_sources(folder: Path, kernel: Path, imitated: Mapping[str, str]) -> None:
    """The package of `kernel` to `folder`; `imitated` says which of its headers have a file here in their place."""
    package, deep_jit = folder / kernel.parent.name, folder / "deep_jit"
    package.mkdir(), deep_jit.mkdir()
    for path in kernel.parent.glob("*.cu*"):
        text = path.read_text().replace("#pragma unroll", "//")
        text = re.sub(r"extern __shared__ __align__\(1024\) u8 (\w+)\[\]", r"SHARED_MEMORY(\1)", text)
        (package / path.name).write_text(text)
    for name, here in imitated.items():
        shutil.copy(HERE / here, package / name)
    shutil.copy(HERE / "hopper_on_host.cuh", deep_jit / "hopper.cuh")
    shutil.copy(HERE / "cluster_on_host.cuh", deep_jit)


def compile_on_host(folder: Path, build: Build, entry: str) -> ctypes.CDLL:
    """The kernel of `build` in a library, with functions `entry` (C++) behind its source."""
    macros = [f"-D{name}={value}" for name, value in build.defines.items()]
    number = len(list(folder.glob("*.cpp")))
    source = folder / f"host_{number}.cpp"
    source.write_text(f'#include "{build.source.parent.name}/{build.source.name}"\n{entry}')
    library = source.with_suffix(".so")
    command = [str(COMPILER), "-O1", "-std=c++17", "-w", "-shared", "-fPIC", *macros, source.name, "-o", library.name]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[:3000]
    return ctypes.CDLL(str(library))
