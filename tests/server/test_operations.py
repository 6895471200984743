"""Readiness, load, aborting, pausing, cache reset, profiles, request IDs, CORS and draining."""

import json
import signal
import socket
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
    failed = server.metric("deepinfer:request_success_total", finished_reason="error")
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
    assert server.metric("deepinfer:request_success_total", finished_reason="error") == failed


def test_abort_is_asked_for_properly(server: Server) -> None:
    for body in ({}, {"request_ids": ["a"], "abort_all": True}, {"request_ids": "a"}):
        check_shape(server.http.post("/abort_requests", json=body), 400, "request_ids")
    assert server.http.post("/abort_requests", json={"request_ids": ["none"]}).json()["aborted"] == []


@pytest.mark.parametrize("mode", ["abort", "wait"])
@pytest.mark.parametrize("names", [("/pause", "/resume"), ("/pause_generation", "/continue_generation")])
def test_pause_and_resume(server: Server, mode: str, names: tuple[str, str]) -> None:
    """In progress: aborted, or finished before the answer comes. New: wait, can be aborted, then run."""
    answers: dict[str, dict[str, Any]] = {}

    def ask(name: str, body: dict[str, Any]) -> threading.Thread:
        def run() -> None:
            answers[name] = server.http.post("/v1/completions", json=body | {"request_id": name}).json()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    early = ask("early", LONG | {"max_tokens": 300})
    server.wait_for("deepinfer:num_requests_running", 1)
    pause, resume = names
    if pause == "/pause":
        paused = server.http.post(pause, params={"mode": mode})
    else:
        paused = server.http.post(pause, json={"mode": mode})
    assert paused.json() == {"status": "paused"} and server.http.get("/is_paused").json() == {"is_paused": True}
    try:
        assert server.metric("deepinfer:num_requests_running") == 0
        early.join(timeout=30)
        reason = answers["early"]["choices"][0]["finish_reason"]
        assert reason == ("abort" if mode == "abort" else "length")
        check_shape(httpx.get(f"{server.url}/ready"), 503)
        check_shape(server.http.get("/health_generate"), 503)
        assert httpx.get(f"{server.url}/health").status_code == 200
        late = [ask(name, LONG | {"max_tokens": 5}) for name in ("late", "never")]
        while server.http.get("/load").json()["num_requests_waiting"] < 2:
            time.sleep(0.02)
        assert server.http.post(pause).json() == {"status": "paused"}, "once more changes nothing for those that wait"
        generated = server.metric("deepinfer:generation_tokens_total")
        assert server.http.post("/abort_request", json={"rid": "never"}).json()["aborted"] == ["never"]
        late[1].join(timeout=30)
        assert answers["never"]["choices"][0]["finish_reason"] == "abort"
        assert "late" not in answers and server.metric("deepinfer:generation_tokens_total") == generated
    finally:
        assert server.http.post(resume).json() == {"status": "resumed"}
    late[0].join(timeout=30)
    assert answers["late"]["usage"]["completion_tokens"] == 5
    assert server.http.get("/is_paused").json() == {"is_paused": False}
    assert httpx.get(f"{server.url}/ready").status_code == 200
    check_shape(server.http.post(pause, json={"mode": "freeze"}), 400, "mode")


@pytest.mark.parametrize("options", [(), ("--in-process",)], ids=["process", "thread"])
def test_what_runs_stands_still_and_goes_on(checkpoint: Path, options: tuple[str, ...]) -> None:
    """`mode=keep`: no token comes while the server is paused, and all of them come afterwards."""
    asked = LONG | {"max_tokens": 400, "seed": 5}
    server = start_server(checkpoint, "--served-model-name", MODEL, "--api-key", KEY, *options)
    try:
        with server.http.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer:
            lines = lines_of(answer)
            next(lines)
            assert server.http.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
            time.sleep(0.2)  # what was on its way
            generated = server.metric("deepinfer:generation_tokens_total")
            assert server.metric("deepinfer:num_requests_running") == 1 and generated < 400
            check_shape(server.http.get("/ready"), 503)
            time.sleep(0.5)
            assert server.metric("deepinfer:generation_tokens_total") == generated
            assert server.http.post("/resume").json() == {"status": "resumed"}
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        whole = server.http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        assert whole.endswith("".join(event["choices"][0]["text"] for event in rest)) and len(rest) > 1
        # A request that stands still can be aborted, and its client may leave: its cache is free at once.
        with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
            next(lines_of(answer))
            server.http.post("/pause", params={"mode": "keep"})
        server.wait_for("deepinfer:num_requests_running", 0)
        assert server.metric("deepinfer:kv_cache_usage_perc") == 0
        server.http.post("/resume")
        assert server.http.post("/v1/completions", json=LONG | {"max_tokens": 3}).status_code == 200
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)


def test_a_paused_server_that_is_stopped_finishes_what_it_has_begun(checkpoint: Path) -> None:
    server = start_server(checkpoint, "--served-model-name", MODEL, "--api-key", KEY)
    try:
        with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "max_tokens": 300}) as answer:
            lines = lines_of(answer)
            next(lines)
            server.http.post("/pause", params={"mode": "keep"})
            server.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(timeout=30) in (0, -signal.SIGTERM)
    finally:
        server.process.kill()


def test_a_client_may_leave_while_the_server_is_paused(server: Server) -> None:
    server.http.post("/pause")
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=LONG, headers={"x-api-key": KEY}, timeout=0.5)
        deadline = time.monotonic() + 10
        while server.http.get("/load").json()["num_requests_waiting"]:
            assert time.monotonic() < deadline
    finally:
        server.http.post("/resume")


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
def test_the_cache_is_reset_unless_it_is_in_use(server: Server, path: str) -> None:
    server.wait_for("deepinfer:num_requests_running", 0)
    answer = server.http.post(path).json()
    assert answer["success"] is True and answer["num_free_blocks"] > 0
    with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
        lines = lines_of(stream)
        next(lines)
        assert check_shape(server.http.post(path), 400)["code"] == "cache_in_use"
        server.http.post("/abort_requests", json={"abort_all": True})
        assert any('"abort"' in line for line in lines)
    server.wait_for("deepinfer:num_requests_running", 0)
    assert server.http.post(path).json() == answer


def test_abort_one_is_asked_for_properly(server: Server) -> None:
    for body in ({}, {"rid": "a", "abort_all": True}, {"rid": ""}):
        check_shape(server.http.post("/abort_request", json=body), 400, "rid")
    assert server.http.post("/abort_request", json={"rid": "none"}).json() == {"aborted": [], "unknown": ["none"]}
    assert server.http.post("/abort_request", json={"rid": "", "abort_all": True}).json()["aborted"] == []


def test_profiles_are_taken_through_the_server(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    check_shape(server.http.post("/start_profile"), 400)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    prefix = ("env", f"DEEPINFER_PROFILER_DIR={tmp_path}")
    profiled = start_server(checkpoint, "--served-model-name", MODEL, "--profiler-port", str(port), prefix=prefix)
    try:
        assert httpx.post(f"{profiled.url}/start_profile").json()["state"] in ("starting", "recording")
        httpx.post(f"{profiled.url}/v1/completions", json=LONG | {"max_tokens": 3}, timeout=60)
        trace = Path(httpx.post(f"{profiled.url}/stop_profile", timeout=60).json()["trace"])
        assert trace.parent == tmp_path and trace.stat().st_size > 1000
        for wrong in ("0", "-1", "1.5", "many"):
            check_shape(httpx.post(f"{profiled.url}/start_profile", params={"num_steps": wrong}), 400, "num_steps")
        check_shape(httpx.post(f"{profiled.url}/stop_profile"), 400)
    finally:
        profiled.process.terminate()
        profiled.process.wait(timeout=30)


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
        other = httpx.options(
            f"{allowing.url}/v1/chat/completions", headers=preflight | {"Origin": "https://b.example"}
        )
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


@pytest.mark.parametrize("options", [(), ("--in-process",)], ids=["process", "thread"])
def test_the_experts_are_recorded(checkpoint: Path, options: tuple[str, ...]) -> None:
    """Every counted token went to as many experts of each layer as the model activates."""
    config = json.loads((checkpoint / "config.json").read_text())["text_config"]
    server = start_server(checkpoint, "--served-model-name", MODEL, *options)

    def ask(command: str) -> httpx.Response:
        return httpx.post(f"{server.url}/{command}_expert_distribution_record")

    def generate() -> None:
        httpx.post(f"{server.url}/v1/completions", json=LONG | {"max_tokens": 200}, timeout=60)

    try:
        generate()
        assert check_shape(ask("dump"), 400)["code"] == "nothing_recorded", "nobody asked to record that"
        assert ask("start").json() == {"is_recording": True}
        deadline = time.monotonic() + 30
        while ask("dump").status_code == 400:
            generate()
            assert time.monotonic() < deadline
        assert ask("stop").json() == {"is_recording": False}
        told = ask("dump").json()
        counts = told["logical_count"]
        assert told["num_steps"] >= 1 and not told["is_recording"]
        assert {len(layer) for layer in counts} == {config["n_routed_experts"]}
        assert len({sum(layer) for layer in counts}) == 1 and sum(counts[0]) > 0
        assert sum(counts[0]) % config["num_experts_per_tok"] == 0
        time.sleep(0.3)
        generate()
        assert ask("dump").json() == told, "it has stopped"
        assert ask("start").json() == {"is_recording": True}
        assert ask("dump").status_code == 400, "and begins anew"
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)
