"""Compiled kernels on disk, named by a hash of all that decides the result; safe when many processes start at once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
from pathlib import Path

from deepinfer.kernels.cpu.build import BuildError, cache_dir
from deepinfer.kernels.deep_jit.compilers import CompileError, Compiler, find_compiler, options

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def included_files(source: Path) -> list[Path]:
    """The source and what it includes by `#include "..."`, nested ones too, sorted."""
    found: set[Path] = set()
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        waiting += [path.parent / name for name in _INCLUDE.findall(path.read_text())]
    return sorted(found)


def cache_key(source: Path, defines: dict[str, int | str], arch: str, compiler: Compiler) -> str:
    """Hash over the texts of all files, the options (macros and target card among them) and the compiler's version."""
    digest = hashlib.sha256(repr((options(defines, arch, Path()), compiler.version)).encode())
    for path in included_files(source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def load_or_compile(source: Path, defines: dict[str, int | str], arch: str) -> bytes:
    """The cubin of `source` for `arch` ("sm_90a"). One process compiles, the others wait for its file.

    Raises CompileError with the compiler's log.
    """
    compiler = find_compiler()
    target = _folder() / f"{source.stem}-{cache_key(source, defines, arch, compiler)}.cubin"
    if target.exists():
        return target.read_bytes()
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel drops it when the process ends, however it ends
        if not target.exists():
            _write(target, compiler.compile(source, options(defines, arch, source.parent)))
    return target.read_bytes()


def _folder() -> Path:
    try:
        folder = cache_dir() / "cuda"
        folder.mkdir(parents=True, exist_ok=True)
    except (BuildError, OSError) as error:
        raise CompileError(f"no folder for compiled kernels: {error}") from None
    return folder


def _write(target: Path, data: bytes) -> None:
    """All of the file or nothing: readers never see a part of it."""
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=target.stem)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(partial, target)
