"""The programs in examples/ run as they are."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.process import Server, start_server

ROOT = Path(__file__).parent.parent
NANO = ROOT / "deepinfer" / "checkpoints" / "nano"
pytestmark = pytest.mark.skipif(
    not list(NANO.glob("*.safetensors")), reason="the nano weights are not in this checkout"
)


def run(*arguments: str) -> str:
    """What examples/ARGUMENTS prints."""
    script, *others = arguments
    command = [sys.executable, str(ROOT / "examples" / script), *others]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start_server(NANO)
    yield running
    running.process.terminate()
    running.process.wait(timeout=30)


def test_offline() -> None:
    assert run("offline.py").count("mean log-probability") == 3


def test_chat_client(server: Server) -> None:
    said = run("chat_client.py", f"{server.url}/v1")
    assert "> What is the capital of Italy?\n" in said and "Rome" in said
    assert said.count(" tokens)") == 2


def test_tools(server: Server) -> None:
    called, told = run("tools.py", f"{server.url}/v1").strip().split("\n")
    assert called.startswith("get_weather({'city': 'Lisbon'}") and "21" in told


def test_structured_output() -> None:
    lines = run("structured_output.py").splitlines()
    assert [line.split(":")[0].strip() for line in lines[1::2]] == ["regex", "json", "ebnf"]
