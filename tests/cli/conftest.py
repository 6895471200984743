"""Runs the real command in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import write_tiny_checkpoint
from tests.cli.command import Run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def run() -> Run:
    def run_command(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "deepinfer.cli", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"} | environment,
        )

    return run_command
