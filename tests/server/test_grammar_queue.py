"""Too many grammars that wait are no fault of a request: a 429 in each protocol, also from another process."""

from pathlib import Path

import httpx
import pytest

from deepinfer.server.errors import BUSY_SECONDS
from tests.server.process import MODEL, start_server

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
FULL_QUEUE = "import deepinfer.structured.compiler as compiler; compiler.MAX_WAITING = 0"


@pytest.mark.parametrize("options", [(), ("--in-process",)])
def test_a_full_queue_of_grammars(checkpoint: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "sitecustomize.py").write_text(FULL_QUEUE)  # every Python that starts reads it, the engine's too
    python = ("env", f"PYTHONPATH={tmp_path}")
    server = start_server(checkpoint, "--served-model-name", MODEL, *options, prefix=python)
    with server.process:
        try:
            for path in ("/v1/chat/completions", "/v1/messages"):
                answer = httpx.post(server.url + path, json=CHAT | {"guided_regex": "a+"}, timeout=60)
                assert answer.status_code == 429 and answer.headers["retry-after"] == str(BUSY_SECONDS)
                error = answer.json()["error"]
                assert error["type"] == "rate_limit_error" and "too many grammars" in error["message"]
                assert error["message"].startswith("guided_regex")
            assert server.metric("deepinfer:requests_rejected_total", reason="grammar_queue") == 2
            assert httpx.post(server.url + "/v1/chat/completions", json=CHAT, timeout=60).status_code == 200
        finally:
            server.process.terminate()
