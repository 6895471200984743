"""Every Triton kernel of the repository compiles for Hopper, on a machine without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted(path for path in (ROOT / "deepinfer").rglob("*.py") if "@triton.jit" in path.read_text())


def backends_of(path: Path) -> list[str]:
    """What compiles the kernels of a file: its operations, or training."""
    operations = re.findall(r'^@?backend\("(\w+)", "cuda"\)', path.read_text(), re.MULTILINE)
    return ["train"] if path.parent.name == "train" else operations


def launched_in(path: Path) -> set[str]:
    return set(re.findall(r"^ *(?:\w+ = )?(_\w+)\[", path.read_text(), re.MULTILINE))


def compile_for_hopper(*arguments: str) -> set[str]:
    """Names of the kernels that compiled."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_hopper", *arguments],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return {line.rsplit(".", 1)[1] for line in run.stdout.splitlines()}


def test_every_launched_kernel_has_something_that_compiles_it():
    """Files that only have functions for other kernels launch none."""
    assert len(SOURCES) > 10
    assert all(backends_of(path) for path in SOURCES if launched_in(path))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [path for path in SOURCES if launched_in(path)], ids=lambda path: path.stem)
def test_compiles_for_hopper(path: Path):
    """And no kernel with a launcher of its own is left out."""
    assert launched_in(path) <= compile_for_hopper(*backends_of(path))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_case_compiles_for_hopper():
    assert compile_for_hopper("--all")
