"""Readiness, load, aborting, request IDs, CORS and draining."""

import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deepinfer import __version__
from tests.server.process import KEY, MODEL, Server, lines_of, start_server
from tests.server.test_errors import check_shape

LONG: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 900, "ignore_eos": True}


def test_ready_and_generating(server: Server) -> None:
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}
    generated = server.metric("deepinfer:generation_tokens_total")
    assert server.http.get("/health_generate").json() == {"status": "ok"}
    assert server.metric("deepinfer:generation_tokens_total") == generated, "a probe is not traffic"
    assert server.metric("deepinfer:num_requests_running") == 0


def test_load_and_settings(server: Server) -> None:
    assert server.http.get("/load").json() == {
        "server_load": 0, "num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage": 0.0,
    }  # fmt: skip
    info = server.http.get("/server_info").json()
    assert (info["version"], info["model"], info["max_model_len"]) == (__version__, MODEL, 1024)
    assert info["engine_config"]["max_num_seqs"] == 16
    assert KEY not in str(info)


@pytest.mark.parametrize("name", ["X-Request-Id", "answer", "all"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_abort(server: Server, path: str, name: str) -> None:
    """The client gets what was generated so far, with the reason; nothing is left running."""
    body = LONG if path == "/v1/completions" else LONG | {"messages": [{"role": "user", "content": "hi"}]}
    headers = {"X-Request-Id": "mine-1"}
    with server.http.stream("POST", path, json=body | {"stream": True}, headers=headers) as answer:
        assert answer.headers["x-request-id"] == "mine-1"
        lines = (line for line in lines_of(answer) if line.startswith("data: "))
        first = httpx.Response(200, content=next(lines)[6:]).json()
        answer_id = first["message"]["id"] if "message" in first else first["id"]
        for _ in range(4):
            next(lines)
        asked: dict[str, Any] = {"request_ids": ["mine-1" if name == "X-Request-Id" else answer_id, "none"]}
        aborted = server.http.post("/abort_requests", json={"abort_all": True} if name == "all" else asked).json()
        rest = list(lines)
    assert aborted["aborted"] == ["mine-1" if name != "answer" else answer_id]
    assert aborted["unknown"] == ([] if name == "all" else ["none"])
    assert "the request was aborted" in rest[-1] if path == "/v1/messages" else '"abort"' in rest[-2]
    assert len(rest) < 600
    server.wait_for("deepinfer:num_requests_running", 0)
    assert server.metric("deepinfer:kv_cache_usage_perc") == 0


def test_abort_is_asked_for_properly(server: Server) -> None:
    for body in ({}, {"request_ids": ["a"], "abort_all": True}, {"request_ids": "a"}):
        check_shape(server.http.post("/abort_requests", json=body), 400, "request_ids")
    assert server.http.post("/abort_requests", json={"request_ids": ["none"]}).json()["aborted"] == []


def test_a_key_aborts_its_own_requests_only(checkpoint: Path) -> None:
    server = start_server(checkpoint, "--served-model-name", MODEL, "--api-key", "one", "--api-key", "two")
    try:
        one, two = (httpx.Client(base_url=server.url, headers={"x-api-key": key}, timeout=60) for key in ("one", "two"))
        headers = {"X-Request-Id": "mine"}
        with one.stream("POST", "/v1/completions", json=LONG | {"stream": True}, headers=headers) as answer:
            lines = lines_of(answer)
            next(lines)
            assert two.post("/abort_requests", json={"abort_all": True}).json()["aborted"] == []
            assert two.post("/abort_requests", json={"request_ids": ["mine"]}).json()["unknown"] == ["mine"]
            assert one.post("/abort_requests", json={"abort_all": True}).json()["aborted"] == ["mine"]
            assert any('"abort"' in line for line in lines)
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)


@pytest.mark.parametrize("given", [None, "abc-1", "x" * 200, "a b", "a\tb", ""])
def test_request_ids(server: Server, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    answers = [server.http.get("/v1/models", headers=headers).headers["x-request-id"] for _ in range(2)]
    if given == "abc-1":
        assert answers == [given, given]
    else:
        assert answers[0] != answers[1] and all(answer.startswith("req_") for answer in answers)
    assert httpx.get(f"{server.url}/v1/models").headers["x-request-id"], "a refused request has one too"
    with pytest.raises(openai.NotFoundError) as refused:
        server.client.models.retrieve("other")
    assert refused.value.request_id


def test_web_pages_may_call_only_if_allowed(server: Server, checkpoint: Path) -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{server.url}/v1/chat/completions", headers=preflight)
    assert answer.status_code == 401 and "access-control-allow-origin" not in answer.headers
    plain = server.http.get("/v1/models", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in plain.headers
    allowing = start_server(checkpoint, "--api-key", KEY, "--allowed-origin", "https://a.example")
    try:
        answer = httpx.options(f"{allowing.url}/v1/chat/completions", headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = httpx.options(f"{allowing.url}/v1/chat/completions", headers=preflight | {"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        assert httpx.post(f"{allowing.url}/v1/chat/completions", headers=preflight).status_code == 401
    finally:
        allowing.process.terminate()
        allowing.process.wait(timeout=30)


def test_a_draining_server_says_so_and_finishes(checkpoint: Path) -> None:
    server = start_server(checkpoint, "--served-model-name", MODEL, "--shutdown-timeout", "60")
    answers: list[httpx.Response] = []
    body = LONG | {"max_tokens": 600}
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))
    )
    thread.start()
    server.wait_for("deepinfer:num_requests_running", 1)
    server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 10
    while httpx.get(f"{server.url}/ready").status_code != 503:
        assert time.monotonic() < deadline
    refused = httpx.post(f"{server.url}/v1/completions", json=body)
    assert check_shape(refused, 503)["type"] == "server_error" and refused.headers["retry-after"]
    check_shape(httpx.get(f"{server.url}/health_generate"), 503)
    assert httpx.get(f"{server.url}/health").status_code == 200, "alive, but not ready"
    thread.join(timeout=60)
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 600
    assert server.process.wait(timeout=30) in (0, -signal.SIGTERM)
