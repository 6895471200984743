"""The cache of run-time compiled kernels: processes that start at once, die, share it with others, find no room."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepinfer.kernels.deep_jit import Build
from deepinfer.kernels.deep_jit import cache as disk
from deepinfer.kernels.deep_jit.cache import cache_key, included_files
from deepinfer.kernels.deep_jit.compilers import Compiler
from tests.kernels.small_kernel import needs_compiler, write_scale

NOBODY = 65534

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a small kernel with a header, beside an empty cache; other users may enter, as they may not into tmp_path."""
    path = Path(tempfile.mkdtemp(prefix="deep-jit-"))
    path.chmod(0o755)
    write_scale(path)
    (path / "cache").mkdir()
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(path / "cache"))
    monkeypatch.setattr(disk, "not_kept", {})
    yield path
    shutil.rmtree(path)


def build(folder: Path, width: int = 128) -> Build:
    return Build("scale", folder / "scale.cu", {"WIDTH": width})


def entries(folder: Path) -> list[str]:
    """Suffixes of what is in the cache."""
    return sorted(path.name.partition(".")[2] for path in (folder / "cache").glob("cuda/*"))


def start(work: Callable[[], str]) -> tuple[int, int]:
    """Fork a process that does it: its ID, and where its answer can be read. No import, so that it starts at once."""
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.write(writer, work().encode())
            os._exit(0)
        except BaseException as error:  # nothing of pytest may run here
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(writer)
    return process, reader


def finish(process: int, reader: int) -> tuple[int, str]:
    """Its exit status (minus the signal that ended it) and its answer."""
    with open(reader) as pipe:
        answer = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), answer


def digest(folder: Path) -> str:
    return hashlib.sha256(build(folder).cubin()).hexdigest()


def as_another_user(folder: Path, work: Callable[[], str]) -> tuple[int, str]:
    """Where the tests run as root, by somebody with no rights; else by the same user, whose rights the test took."""

    def without_rights() -> str:
        if os.getuid() == 0:
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            except OSError:
                return "no other user"  # in a container with one
            if not os.access(folder, os.X_OK):
                return "no other user"  # may enter here
        return work()

    status, answer = finish(*start(without_rights))
    if answer == "no other user":
        pytest.skip("there is no other user here, or none that may enter the temporary folder")
    return status, answer


# ------------------------------------------------------------------ one process


@needs_compiler
def test_compiles_once_then_reads_the_file(folder):
    first = build(folder).cubin()
    (path,) = (folder / "cache").glob("cuda/*.cubin")
    before = path.stat()
    assert build(folder).cubin() == first == path.read_bytes()
    assert first.startswith(b"\x7fELF")
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@needs_compiler
def test_what_changes_the_result_changes_the_file(folder):
    build(folder).cubin()
    build(folder, 256).cubin()
    Build("scale", folder / "scale.cu", {"WIDTH": 256}, arch="sm_90").cubin()
    assert entries(folder) == ["cubin"] * 3 + ["lock"] * 3
    (folder / "factor.cuh").write_text("#pragma once\n#define FACTOR 3.0f\n")
    build(folder, 256).cubin()
    assert entries(folder) == ["cubin"] * 4 + ["lock"] * 4


def test_the_key_covers_the_compiler_and_nested_headers(folder):
    source = folder / "scale.cu"
    old, new = (Compiler(version, lambda *_: b"") for version in ("nvrtc 13.0", "nvrtc 13.1"))
    assert cache_key(source, {}, "sm_90a", old) != cache_key(source, {}, "sm_90a", new)
    (folder / "factor.cuh").write_text('#include "deeper.cuh"\n#define FACTOR 2.0f\n')
    (folder / "deeper.cuh").write_text('#include "factor.cuh"\n')  # a circle is no trouble
    assert included_files(source) == sorted(folder / name for name in ("scale.cu", "factor.cuh", "deeper.cuh"))
    before = cache_key(source, {}, "sm_90a", old)
    (folder / "deeper.cuh").write_text("#define DEEPER 1\n")
    assert cache_key(source, {}, "sm_90a", old) != before


# ------------------------------------------------------------------ many processes


@needs_compiler
def test_eight_processes_at_once_leave_one_file(folder):
    answers = [finish(*child) for child in [start(lambda: digest(folder)) for _ in range(8)]]
    assert answers == [(0, digest(folder))] * 8
    assert entries(folder) == ["cubin", "lock"]


@needs_compiler
def test_a_killed_compilation_blocks_nobody(folder):
    child = start(lambda: digest(folder))
    deadline = time.monotonic() + 60
    while not list((folder / "cache").glob("cuda/*.lock")) and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(child[0], signal.SIGKILL)
    finish(*child)
    assert build(folder).cubin().startswith(b"\x7fELF")


@needs_compiler
def test_a_writer_killed_halfway_leaves_nothing_that_is_read(folder):
    """A limit on the size of files ends the process in the middle of its write."""

    def write_and_die() -> str:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        return digest(folder)

    assert finish(*start(write_and_die))[0] == -signal.SIGXFSZ
    (left,) = (folder / "cache").glob("cuda/*.part")
    assert left.stat().st_size == 1000
    assert build(folder).cubin().startswith(b"\x7fELF")
    assert entries(folder) == ["cubin", "lock"]


# ------------------------------------------------------------------ no room, no rights


@needs_compiler
def test_a_full_disk_costs_time_alone(folder):
    """Likewise, with the signal ignored: the write fails."""

    def compile_twice() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        first = build(folder).cubin()
        return f"{build(folder).cubin() == first} {len(disk.not_kept)} {first[:4]!r}"

    assert finish(*start(compile_twice)) == (0, "True 1 b'\\x7fELF'")
    assert entries(folder) == ["lock"]


@needs_compiler
def test_a_folder_that_cannot_be_written_costs_time_alone(folder):
    (folder / "cache" / "cuda").mkdir()
    (folder / "cache" / "cuda").chmod(0o555)
    status, answer = as_another_user(folder, lambda: f"{digest(folder)} {len(disk.not_kept)}")
    (folder / "cache" / "cuda").chmod(0o755)
    assert (status, answer) == (0, f"{digest(folder)} 1")


@needs_compiler
@pytest.mark.parametrize("place", ("cache", "cache/cuda"))
def test_no_folder_costs_time_alone(folder, place, caplog):
    (folder / "cache").rmdir()
    if place != "cache":
        (folder / "cache").mkdir()
    (folder / place).write_text("")  # a file is in its place
    first = build(folder).cubin()
    assert first.startswith(b"\x7fELF") and build(folder).cubin() == first
    (record,) = caplog.records
    assert "not kept" in record.message and str(folder) in record.message


@needs_compiler
def test_users_share_what_one_compiled(folder):
    expected = digest(folder)
    (path,) = (folder / "cache").glob("cuda/*.cubin")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~current_umask()
    assert as_another_user(folder, lambda: f"{digest(folder)} {len(disk.not_kept)}") == (0, f"{expected} 0")
    path.unlink()  # its lock is the first user's and stays
    (folder / "cache" / "cuda").chmod(0o777)
    assert as_another_user(folder, lambda: f"{digest(folder)} {len(disk.not_kept)}") == (0, f"{expected} 0")
    assert entries(folder) == ["cubin", "lock"]


@needs_compiler
@pytest.mark.skipif(os.getuid() != 0, reason="root can make files that others cannot read")
def test_a_file_that_cannot_be_read_is_compiled_again(folder):
    expected = digest(folder)
    (path,) = (folder / "cache").glob("cuda/*.cubin")
    path.chmod(0o600)
    assert as_another_user(folder, lambda: f"{digest(folder)} {len(disk.not_kept)}") == (0, f"{expected} 1")


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
