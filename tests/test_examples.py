"""The programs in examples/ run as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NANO = ROOT / "deepinfer" / "checkpoints" / "nano"


@pytest.mark.skipif(not list(NANO.glob("*.safetensors")), reason="the nano weights are not in this checkout")
def test_offline() -> None:
    answer = subprocess.run(
        [sys.executable, ROOT / "examples" / "offline.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("mean log-probability") == 3
