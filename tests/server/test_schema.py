"""The OpenAPI schema against the server that serves it: whatever fits the schema, or nearly, is no 5xx."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.process import MODEL, Server, start_server

EXAMPLES = os.environ.get("SCHEMA_EXAMPLES", "25")  # of each operation and phase


@pytest.fixture(scope="module")
def own_server(checkpoint: Path) -> Iterator[Server]:
    """Not the one of all tests: it is paused, and its caches are reset."""
    options = ("--max-num-seqs", "16", "--max-queue", "256", "--max-model-len", "64")
    running = start_server(checkpoint, "--served-model-name", MODEL, *options)
    yield running
    running.process.terminate()
    running.process.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_operation_answers_with_a_server_error(own_server: Server, tmp_path: Path) -> None:
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed (make test-schema installs it)")
    # A paused server lets requests wait, which schemathesis would wait for.
    left_out = [word for path in ("/pause", "/pause_generation") for word in ("--exclude-path", path)]
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{own_server.url}/openapi.json", *left_out]
    command += ["--checks", "not_a_server_error", "--max-examples", EXAMPLES, "--request-timeout", "60"]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.server.schema_hooks", "SERVED_MODEL": MODEL, "PYTHONPATH": os.getcwd()}
    run = subprocess.run(command, env=os.environ | hooks, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and "failed" not in run.stdout, run.stdout[-2000:]
    assert httpx.get(f"{own_server.url}/ready").status_code == 200
    assert own_server.metric("deepinfer:engine_restarts") == 0
    assert own_server.metric("deepinfer:generation_tokens_total") > 100, "requests got as far as the model"
    assert not any("Traceback" in line for line in own_server.log), "".join(own_server.log)[-4000:]
