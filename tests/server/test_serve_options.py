"""Options of `deepinfer serve` that change how it answers, and those of other servers that it refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deepinfer.engine import child
from tests.server.process import MODEL, Server, start_server

ASK = {"model": MODEL, "prompt": "hello", "max_tokens": 17, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def behind_proxy(checkpoint: Path) -> Iterator[Server]:
    options = ("--root-path", "/llm/v4", "--stream-interval", "8", "--threads", "3", "--api-key", "k")
    options += ("--enable-force-include-usage", "--disable-uvicorn-access-log")
    running = start_server(checkpoint, "--served-model-name", MODEL, *options)
    yield running
    running.process.terminate()
    running.process.wait(timeout=30)


def test_a_proxy_may_keep_or_strip_its_prefix(behind_proxy: Server) -> None:
    key = {"Authorization": "Bearer k"}
    for prefix in ("", "/llm/v4"):
        url = behind_proxy.url + prefix
        assert httpx.get(f"{url}/health").status_code == 200, "open without a key, under both names"
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.post(f"{url}/v1/completions", json=ASK, headers=key, timeout=60).status_code == 200
        refused = httpx.post(f"{url}/v1/messages", json={}, headers=key)
        assert refused.json()["type"] == "error" and "request-id" in refused.headers, "in the shape of the protocol"
    assert httpx.get(f"{behind_proxy.url}/llm/v4x/health", headers=key).status_code == 404
    assert httpx.get(f"{url}/openapi.json", headers=key).json()["servers"] == [{"url": "/llm/v4"}]


def test_events_wait_for_the_interval_of_the_server(behind_proxy: Server) -> None:
    def count(extra: dict[str, int]) -> int:
        body, key = ASK | extra | {"stream": True}, {"Authorization": "Bearer k"}
        return httpx.post(f"{behind_proxy.url}/v1/completions", json=body, headers=key, timeout=60).text.count('"text"')

    assert count({}) == 3  # 1 + 8 + 8 tokens
    assert count({"stream_interval": 1}) == 17


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_comes_unasked_where_the_server_is_told_so(behind_proxy: Server, path: str) -> None:
    body = ASK | {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    if path == "/v1/chat/completions":
        body.pop("prompt")
    answer = httpx.post(behind_proxy.url + path, json=body, headers={"Authorization": "Bearer k"}, timeout=60)
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    assert events[-1]["usage"]["completion_tokens"] == 17 and events[-1]["choices"] == []
    assert not any("POST" in line for line in behind_proxy.log), "no line a request"


def test_nothing_describes_the_api_where_that_is_not_wanted(checkpoint: Path) -> None:
    running = start_server(checkpoint, "--disable-fastapi-docs", "--disable-log-stats")
    try:
        for path in ("/docs", "/openapi.json"):
            assert httpx.get(running.url + path).status_code == 404
    finally:
        running.process.terminate()
        running.process.wait(timeout=30)


def test_the_engine_gets_the_threads_that_were_asked_for(behind_proxy: Server) -> None:
    pid = behind_proxy.process.pid
    engine = Path(f"/proc/{pid}/task/{pid}/children")
    if not engine.exists():
        pytest.skip("no /proc")
    environment = Path(f"/proc/{engine.read_text().split()[0]}/environ").read_bytes().split(b"\0")
    assert b"OMP_NUM_THREADS=3" in environment


@pytest.mark.parametrize(
    ("cores", "asked", "threads"),
    [
        (1, None, 1),
        (2, None, 2),
        (3, None, 2),
        (16, None, 15),
        (16, "4", 4),
        (2, "8", 8),
        (4, "0", 3),
        (4, "many", 3),
        (4, "", 3),
    ],
)
def test_one_core_is_left_to_the_server(
    monkeypatch: pytest.MonkeyPatch, cores: int, asked: str | None, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert child.default_threads() == threads


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--api-server-count", "2"], "--api-server-count must be 1, got 2"),
        (["--headless"], "--headless is not supported"),
        (["--chat-template", "x.jinja"], "--chat-template is not supported: the prompt format belongs to the model"),
        (["--root-path", "llm"], "--root-path must be a path such as /llm"),
        (["--root-path", "/llm/"], "--root-path must be a path such as /llm"),
        (["--root-path", "/a b"], "--root-path must be a path such as /llm"),
        (["--threads", "0"], "--threads"),
        (["--disable-access-log-for-endpoints", "/load,ping"], "--disable-access-log-for-endpoints must be paths"),
        (["--stream-interval", "0"], "--stream-interval"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(options: list[str], told: str) -> None:
    command = [sys.executable, "-m", "deepinfer.cli", "serve", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
    assert "listening" not in done.stderr
