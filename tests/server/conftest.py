"""One server over a tiny random checkpoint for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import deepinfer
from tests.checkpoints import write_tiny_checkpoint
from tests.server.process import KEY, MODEL, Server, start_server


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[Server]:
    options = ("--max-num-seqs", "16", "--max-queue", "256")
    running = start_server(checkpoint, "--served-model-name", MODEL, "--api-key", KEY, *options)
    yield running
    running.process.terminate()
    assert running.process.wait(timeout=30) in (0, -15)
    assert not any("Traceback" in line for line in running.log), "".join(running.log)


NANO = Path(deepinfer.__file__).parent / "checkpoints" / "nano"


@pytest.fixture(scope="session")
def nano() -> Iterator[Server]:
    """A server of the shipped checkpoint, which was trained to think and to call tools."""
    if not list(NANO.glob("*.safetensors")):
        pytest.skip("the nano weights are not in this checkout")
    running = start_server(NANO, "--served-model-name", "nano", "--api-key", KEY, "--max-num-seqs", "4")
    yield running
    running.process.terminate()
    assert running.process.wait(timeout=30) in (0, -15)
    assert not any("Traceback" in line for line in running.log), "".join(running.log)
