"""Every Triton kernel compiles for Hopper, on any machine that has Triton."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted((ROOT / "deepinfer/kernels/cuda").glob("*.py"))
OPERATIONS = [
    (path.stem, re.findall(r'^@backend\("(\w+)", "cuda"\)', path.read_text(), re.MULTILINE)) for path in SOURCES
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("module", "operations"), [(m, o) for m, o in OPERATIONS if o])
def test_compiles_for_hopper(module: str, operations: list[str]):
    """And no kernel with a launcher of its own is left out."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_hopper", *operations],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    source = (ROOT / f"deepinfer/kernels/cuda/{module}.py").read_text()
    launched = set(re.findall(r"^ *(_\w+)\[", source, re.MULTILINE))
    assert launched <= {line.rsplit(".", 1)[1] for line in run.stdout.splitlines()}
