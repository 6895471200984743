"""A prompt that is not text: one line that names it, exit code 2."""

import os
import subprocess
import sys

import pytest

DEEPINFER = [sys.executable, "-m", "deepinfer.cli"]
BAD = b"caf\xe9"  # Latin-1, which Python hands on as a lone surrogate


@pytest.mark.parametrize(
    ("arguments", "typed"),
    [
        (["generate", BAD], b""),
        (["generate", "-"], BAD),
        (["chat", "--quick", BAD], b""),
    ],
    ids=["generate", "generate-stdin", "chat"],
)
@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_bytes_that_are_no_text(arguments: list[str | bytes], typed: bytes, locale: str) -> None:
    environment = {**os.environ, "LC_ALL": locale}
    answer = subprocess.run([*DEEPINFER, *arguments], input=typed, capture_output=True, env=environment, timeout=60)
    lines = answer.stderr.decode().strip().split("\n")
    assert answer.returncode == 2 and answer.stdout == b"", answer.stderr
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    assert ("prompt" if arguments[0] == "generate" else "--quick") in lines[0], lines
