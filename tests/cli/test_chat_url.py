"""`deepinfer chat --url`: the same conversation through a real server."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import Run
from tests.server.process import Server, start_server


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    running = start_server(checkpoint, "--api-key", "k")
    yield running
    running.process.terminate()
    running.process.wait(timeout=30)


def ask(run: Run, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return run("chat", "-t", "0", "--max-tokens", "9", "--stats", *arguments, **extra)


@pytest.mark.parametrize("thinking", [(), ("--thinking",)])
def test_a_server_answers_as_the_model_does(run: Run, checkpoint: Path, server: Server, thinking: tuple) -> None:
    script = "hello\nhow are you?\n/exit\n"
    local = ask(run, "--model", str(checkpoint), "--system", "Be brief.", *thinking, stdin=script)
    for url in (server.url, f"{server.url}/v1", f"{server.url}/v1/"):
        remote = ask(run, "--url", url, "--api-key", "k", "--system", "Be brief.", *thinking, stdin=script)
        assert remote.returncode == 0, remote.stderr
        timeless = [re.sub(r"TTFT \d+ ms, .*?\]", "]", answer.stdout) for answer in (local, remote)]
        assert timeless[0] == timeless[1] and "generated" in timeless[0]


def test_what_the_server_refuses_is_one_line(run: Run, server: Server) -> None:
    for arguments, needle in (
        (("--url", server.url), "API key"),
        (("--url", "localhost:8000"), "http://"),
        (("--url", "http://127.0.0.1:9"), "127.0.0.1:9"),
        (("--url", server.url, "--api-key", "k", "--max-tokens", "5000"), "max_tokens"),
    ):
        refused = ask(run, *arguments, "-q", "hi")
        assert refused.returncode == 2 and needle in refused.stderr and refused.stderr.count("\n") == 1, refused.stderr
