"""Building the C kernels: cached by content, safe for many processes, and never fatal."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deepinfer.commands.doctor import home_dir
from deepinfer.kernels.cpu import build
from deepinfer.kernels.cpu.int8 import multiplies_int8

USE = """
import torch
from deepinfer.kernels import ops
from deepinfer.kernels.cpu import cpu_backend_status
y = ops.rms_norm(torch.tensor([[3.0, 4.0] * 8]), torch.ones(16), 0.0)
torch.testing.assert_close(y[0, :2], torch.tensor([3.0, 4.0]) / 12.5**0.5)
print(int(cpu_backend_status().active), cpu_backend_status().detail)
"""
needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler here")


def use_kernels(cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh process that runs one kernel with its library cache at `cache`."""
    values = {**os.environ, "OMP_NUM_THREADS": "1", "DEEPINFER_CACHE_DIR": str(cache), **environment}
    return subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, env=values, timeout=280)


@needs_compiler
def test_builds_once_and_is_cached(tmp_path):
    first = use_kernels(tmp_path)
    assert first.returncode == 0 and first.stdout.startswith("1 "), first.stderr
    (library,) = tmp_path.iterdir()
    before = library.stat()
    second = use_kernels(tmp_path)
    assert second.stdout == first.stdout
    assert library.stat().st_mtime_ns == before.st_mtime_ns and library.stat().st_ino == before.st_ino


@needs_compiler
def test_many_processes_build_at_once(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(use_kernels, [tmp_path] * 3))
    assert [r.returncode for r in results] == [0] * 3
    assert len({r.stdout for r in results}) == 1 and results[0].stdout.startswith("1 ")
    assert [p.suffix for p in tmp_path.iterdir()] == [".so"]  # no temporary left behind


@pytest.mark.parametrize("environment", [{"CC": "/nonexistent/cc"}, {"CC": "false"}, {"PATH": "/nonexistent"}])
def test_without_a_working_compiler_the_references_run(tmp_path, environment, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    result = use_kernels(tmp_path, **environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("0 ")
    assert result.stderr.count("CPU kernels run in PyTorch") == 1
    assert "Traceback" not in result.stderr


@needs_compiler
def test_unwritable_cache_is_reported_not_raised(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = use_kernels(blocked)
    assert result.returncode == 0 and "cannot write" in result.stdout


@needs_compiler
def test_truncated_library_is_rebuilt(tmp_path):
    """A library that cannot be loaded (a full disk, a copied home) does not disable the kernels for good."""
    library = build.libraries()[0].name
    (tmp_path / library).write_bytes(b"\x7fELF")
    result = use_kernels(tmp_path)
    assert result.stdout.startswith("1 "), result.stderr


@needs_compiler
@pytest.mark.parametrize("index", range(len(build.VARIANTS) - 1))  # the last one: test_cpu_paths.py
def test_every_variant_compiles(tmp_path, index):
    """Also the ones for compilers without OpenMP or -march=native, and without a warning treated as an error."""
    target = tmp_path / "kernels.so"
    build.build(index, target)
    assert target.stat().st_size > 10_000


@needs_compiler
def test_openmp_needs_no_header(tmp_path, monkeypatch):
    """clang is often installed without omp.h; the first variant, with threads, must still compile."""
    (tmp_path / "omp.h").write_text("#error there is no omp.h here\n")
    monkeypatch.setenv("CPATH", str(tmp_path))
    build.build(0, tmp_path / "kernels.so")


@needs_compiler
def test_the_compiler_may_be_a_command_of_several_words(tmp_path, monkeypatch):
    (plain,) = build.find_compiler()
    monkeypatch.setenv("CC", f"env LANG=C '{plain}'")
    assert build.find_compiler()[1:] == ["LANG=C", plain]
    result = use_kernels(tmp_path, CC=f"env LANG=C '{plain}'")
    assert result.stdout.startswith("1 "), result.stderr


@pytest.mark.parametrize("command", [" ", "gcc 'unclosed", "nonexistent-wrapper gcc"])
def test_a_compiler_command_that_cannot_be_found_is_none(monkeypatch, command):
    monkeypatch.setenv("CC", command)
    assert build.find_compiler() is None


def test_place_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "chosen"))
    assert build.cache_dir() == tmp_path / "chosen"
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", "")
    with pytest.raises(ValueError, match="DEEPINFER_CACHE_DIR='': must not be empty"):
        build.cache_dir()
    monkeypatch.delenv("DEEPINFER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_dir() == tmp_path / "xdg" / "deepinfer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.cache_dir() == tmp_path / "home" / ".cache" / "deepinfer"


@pytest.fixture
def user_without_home(tmp_path, monkeypatch):
    """What a container run under any user id looks like: no HOME, and no entry in the user database."""

    def unknown(uid: int):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "DEEPINFER_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"deepinfer-{os.getuid()}"


def test_without_a_home_the_cache_is_a_private_temporary_folder(user_without_home):
    assert build.cache_dir() == user_without_home == build.cache_dir()
    assert user_without_home.stat().st_mode & 0o777 == 0o700
    assert home_dir() == user_without_home.parent
    user_without_home.chmod(0o777)
    with pytest.raises(build.BuildError, match="can be written by another user; set DEEPINFER_CACHE_DIR"):
        build.cache_dir()
    user_without_home.rmdir()
    user_without_home.symlink_to(user_without_home.parent)
    with pytest.raises(build.BuildError, match="can be written by another user"):
        build.cache_dir()


def test_a_misspelt_choice_of_kernels_is_refused(tmp_path):
    result = use_kernels(tmp_path, DEEPINFER_KERNELS="refrence")
    assert result.returncode != 0
    assert "DEEPINFER_KERNELS='refrence': must be one of auto, reference" in result.stderr


@needs_compiler
def test_int8_is_multiplied_where_the_processor_has_instructions_for_it():
    flags = build.cpu_features().split()
    assert multiplies_int8() == {"avx512bw", "avx512vl", "avx512_vnni"}.issubset(flags)
