"""Runs commands: in this process where that is enough (importing PyTorch costs seconds), else in one of their own."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.cli import main
from tests.checkpoints import write_tiny_checkpoint
from tests.cli.command import Run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call the command's entry point as the installed script does."""
    monkeypatch.setenv("COLUMNS", "120")

    def run_main(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as exit_info:
                main(list(arguments))
        return subprocess.CompletedProcess(arguments, exit_info.value.code, out.getvalue(), err.getvalue())  # type: ignore[arg-type]

    return run_main


@pytest.fixture(scope="session")
def run_process() -> Run:
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
