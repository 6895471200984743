"""Compiled kernels on disk, named by a hash of all that decides the result; safe when many processes start at once.

A file appears whole or not at all, also when its writer is killed. A folder that cannot be written (read-only, full,
another user's) costs time alone: each process then compiles for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepinfer.kernels.cpu.build import BuildError, cache_dir
from deepinfer.kernels.deep_jit.compilers import Compiler, find_compiler, options

logger = logging.getLogger(__name__)
not_kept: dict[str, bytes] = {}  # compiled by this process and not on disk, by name
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
    compiler, arguments = find_compiler(), options(defines, arch, source.parent)
    name = _name(source, defines, arch, compiler)
    if name in not_kept:
        return not_kept[name]
    try:
        folder = _folder()
    except (BuildError, OSError) as error:
        return _only_here(name, compiler.compile(source, arguments), error)
    target = folder / f"{name}.cubin"
    if cubin := _read(target):
        return cubin
    with _lock(target.with_suffix(".lock")) as alone:
        if cubin := _read(target):  # somebody was faster
            return cubin
        cubin = compiler.compile(source, arguments)
        try:
            _write(target, cubin, alone)
        except OSError as error:
            return _only_here(name, cubin, error)
        return cubin


def is_kept(source: Path, defines: dict[str, int | str], arch: str) -> bool:
    """Whether the cubin is on disk. Raises CompileError without a compiler: its version is part of the name."""
    try:
        return (cache_dir() / "cuda" / f"{_name(source, defines, arch, find_compiler())}.cubin").is_file()
    except (BuildError, OSError):
        return False


def check_writable() -> None:
    """Raises BuildError or OSError saying why nothing can be kept on disk."""
    with tempfile.TemporaryFile(dir=_folder()):
        pass


def _folder() -> Path:
    folder = cache_dir() / "cuda"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _name(source: Path, defines: dict[str, int | str], arch: str, compiler: Compiler) -> str:
    return f"{source.stem}-{cache_key(source, defines, arch, compiler)}"


def _only_here(name: str, cubin: bytes, error: Exception) -> bytes:
    if not not_kept:
        logger.warning("compiled kernels are not kept, every process compiles its own: %s", error)
    not_kept[name] = cubin
    return cubin


def _read(target: Path) -> bytes | None:
    try:
        return target.read_bytes()
    except OSError:  # not there, or another user's
        return None


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Yields whether this thread is alone; the system drops the lock when its process ends, however it ends.

    Where there can be no lock (a read-only folder, a file system without them), some may compile the same.
    """
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)  # another user's will do
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(lock)


def _write(target: Path, cubin: bytes, alone: bool) -> None:
    """All of the file or nothing, for whoever the umask lets read it; `alone`: what killed writers left goes first."""
    part = target.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        for left in target.parent.glob(f"{target.stem}.*.part") if alone else ():
            left.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(cubin)
            file.flush()
            os.fsync(file.fileno())  # else a machine that stops may keep the name of an empty file
        os.replace(part, target)
    except OSError:
        part.unlink(missing_ok=True)
        raise
