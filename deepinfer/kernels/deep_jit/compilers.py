"""The two ways from CUDA C++ to a cubin: NVRTC, which comes with PyTorch's CUDA wheels, and nvcc."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SECONDS_A_FILE = 300


class CompileError(Exception):
    """A source did not compile, or there is no compiler; the text is the compiler's log with file and line."""


@dataclass(frozen=True)
class Compiler:
    """A CUDA compiler: `version` is part of the cache's key; `compile(source, options)` gives a cubin."""

    version: str
    compile: Callable[[Path, Sequence[str]], bytes]


def options(defines: dict[str, int | str], arch: str, include: Path) -> list[str]:
    """Command-line options that both compilers understand."""
    macros = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    return ["-std=c++17", f"-arch={arch}", f"-I{include}", *macros]


@cache
def find_compiler() -> Compiler:
    """NVRTC if its library is found, else nvcc. Raises CompileError with what to install."""
    for library in _nvrtc_libraries():
        try:
            if "/" in library:  # NVRTC looks for its built-in functions by name alone: have them loaded before
                for builtins in Path(library).parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins))
            return _nvrtc(ctypes.CDLL(library))
        except OSError:
            continue
    toolkit = os.environ.get("CUDA_HOME")
    if nvcc := shutil.which("nvcc") or (toolkit and shutil.which(os.path.join(toolkit, "bin", "nvcc"))):
        return _nvcc(nvcc)
    raise CompileError("no CUDA compiler: install nvidia-cuda-nvrtc (PyTorch's CUDA wheels bring it) or nvcc")


# ------------------------------------------------------------------ NVRTC


def _nvrtc_libraries() -> list[str]:
    """Paths and names to try: wheels first, then the loader's own search."""
    found: list[str] = []
    for folder in map(Path, sys.path):
        for pattern in ("nvidia/cu1*/lib/libnvrtc.so.1*", "nvidia/cuda_nvrtc/lib/libnvrtc.so.1*"):
            found += map(str, sorted(folder.glob(pattern), reverse=True))
    found = [path for path in found if "alt" not in Path(path).name]
    return [*found, "libnvrtc.so.13", "libnvrtc.so.12"]


def _nvrtc(library: ctypes.CDLL) -> Compiler:
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))

    def compile_source(source: Path, arguments: Sequence[str]) -> bytes:
        program = ctypes.c_void_p()
        text = source.read_bytes()
        status = library.nvrtcCreateProgram(ctypes.byref(program), text, str(source).encode(), 0, None, None)
        _check_nvrtc(library, status, "nvrtcCreateProgram")
        try:
            encoded = [argument.encode() for argument in arguments]
            array = (ctypes.c_char_p * len(encoded))(*encoded)
            if library.nvrtcCompileProgram(program, len(encoded), array):
                raise CompileError(
                    _errors(_nvrtc_text(library, program, "ProgramLog").decode(errors="replace"), source)
                )
            return _nvrtc_text(library, program, "CUBIN")
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    return Compiler(f"nvrtc {major.value}.{minor.value}", compile_source)


def _nvrtc_text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check_nvrtc(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    _check_nvrtc(library, getattr(library, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.raw


def _check_nvrtc(library: ctypes.CDLL, status: int, call: str) -> None:
    if status:
        raise CompileError(f"{call}: {library.nvrtcGetErrorString(status).decode()}")


# ------------------------------------------------------------------ nvcc


def _nvcc(program: str) -> Compiler:
    answer = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"V([\d.]+)", answer)

    def compile_source(source: Path, arguments: Sequence[str]) -> bytes:
        # -arch=sm_90a would also build for sm_90, which has no wgmma; -gencode names the one target.
        target = [
            f"-gencode=arch={a[6:].replace('sm_', 'compute_')},code={a[6:]}" if a.startswith("-arch=") else a
            for a in arguments
        ]
        with tempfile.TemporaryDirectory(prefix="deepinfer-nvcc-") as folder:
            out = Path(folder) / "kernel.cubin"
            command = [program, "-cubin", *target, str(source), "-o", str(out)]
            try:
                result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_A_FILE)
            except subprocess.TimeoutExpired:
                raise CompileError(f"{source.name}: nvcc took more than {SECONDS_A_FILE} s") from None
            if result.returncode:
                raise CompileError(_errors(result.stderr + result.stdout, source))
            return out.read_bytes()

    return Compiler(f"nvcc {release.group(1) if release else 'unknown'}", compile_source)


def _errors(log: str, source: Path) -> str:
    """The log without warnings, each error on its line as `file(line): error: ...`; the whole log if there is none."""
    lines = [line.strip() for line in log.replace("\0", "").splitlines() if re.search(r"\berror\b", line)]
    return f"{source.name} does not compile:\n" + ("\n".join(lines) or log.strip())
