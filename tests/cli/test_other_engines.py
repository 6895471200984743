"""Options that vLLM and SGLang have and this server has not: the error says what to do instead."""

import subprocess
import sys

import pytest
import typer

from deepinfer.cli import app
from deepinfer.commands.other_engines import _ANSWERS


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--tensor-parallel-size", "2"], "one device"),
        (["--tp=8"], "one device"),
        (["--enable-prefix-caching"], "prefix cache"),
        (["--enforce-eager"], "DEEPINFER_CUDA_GRAPHS=0"),
    ],
)
def test_says_what_to_do(arguments, part):
    command = [sys.executable, "-m", "deepinfer.cli", "serve", "nano", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {arguments[0].partition('=')[0]} is another engine's option: ")
    assert part in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_option_of_our_own_gets_no_advice():
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    ours = {name for parameter in serve.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert not ours & set(_ANSWERS)
