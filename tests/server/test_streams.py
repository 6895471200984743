"""How answers are streamed: slow readers, readers that read nothing, intervals, and the short way of plain tokens."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from deepinfer.server import connection as connection_module
from tests.server.process import KEY, MODEL, Server, lines_of

CHAT: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "seed": 3, "ignore_eos": True,
}  # fmt: skip
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 40, "seed": 3, "ignore_eos": True}
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/messages": CHAT,
    "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": 40, "seed": 3, "ignore_eos": True},
}


def events_of(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.http.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(line[6:]) for line in lines_of(answer) if line.startswith("data: {")]


def said(event: dict[str, Any]) -> str:
    """The text that an event of any of the four protocols brings."""
    if event.get("choices"):
        choice = event["choices"][0]
        return choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    delta = event.get("delta")
    if event.get("type") == "response.output_text.delta":
        return delta
    return delta.get("text", "") if isinstance(delta, dict) else ""


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload


def slow_socket(server: Server) -> socket.socket:
    """A connection whose own buffer holds next to nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    return connection


def data_of(received: bytes) -> list[dict[str, Any]]:
    """Events of an answer as it came over the wire, chunk sizes left out."""
    parts = received.partition(b"\r\n\r\n")[2]
    body = b""
    while parts:
        size, _, parts = parts.partition(b"\r\n")
        length = int(size, 16)
        body, parts = body + parts[:length], parts[length + 2 :]
        if length == 0:
            break
    return [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]


@pytest.mark.parametrize("thinking", [False, True])
def test_plain_tokens_are_streamed_as_all_others(server: Server, thinking: bool) -> None:
    """Chunks made from a template are equal to those built one by one, which a request for token IDs needs."""
    body = CHAT | {"thinking": {"type": "enabled" if thinking else "disabled"}}
    events, built = (
        events_of(server, "/v1/chat/completions", body | {"return_token_ids": ids}) for ids in (False, True)
    )
    for one, other in zip(events, built, strict=True):
        for event in (one, other):
            for name in ("id", "created", "prompt_token_ids"):
                event.pop(name, None)
            event["choices"][0].pop("token_ids", None)
        assert list(one) == list(other) and one == other
    reasoning = sum(bool(event["choices"][0]["delta"].get("reasoning")) for event in events)
    assert reasoning > 20 if thinking else reasoning == 0


def test_a_streamed_completion_is_the_whole_one(server: Server) -> None:
    events = events_of(server, "/v1/completions", TEXT)
    whole = server.http.post("/v1/completions", json=TEXT).json()["choices"][0]["text"]
    assert "".join(map(said, events)) == whole and len(events) == 40


def test_a_client_that_reads_late_gets_all_of_it(server: Server) -> None:
    """It reads nothing until the answer has long been generated. Every event of /generate repeats the text so far, more
    than the buffers between the two hold: the server must keep the news, and sends those of many steps in one.
    """
    sampling = {"max_new_tokens": 900, "ignore_eos": True, "temperature": 0}
    body = {"text": "hello", "sampling_params": sampling}
    expected = server.http.post("/generate", json=body).json()
    generated = server.metric("deepinfer:generation_tokens_total")
    with slow_socket(server) as connection:
        connection.sendall(request_bytes("/generate", body | {"stream": True}))
        last = -1.0
        while (now := server.metric("deepinfer:generation_tokens_total")) != last or now == generated:
            last = now
            time.sleep(1)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    events = data_of(received)
    assert events[-1]["text"] == expected["text"] and events[-1]["output_ids"] == expected["output_ids"]
    assert len(events) < 900
    assert all(two["text"].startswith(one["text"]) for one, two in zip(events, events[1:], strict=False))
    server.wait_for("deepinfer:num_requests_running", 0)


def test_readers_that_are_slow_do_not_hold_up_the_others(server: Server) -> None:
    """/generate repeats the whole text in every event: eight answers that nobody reads fill every buffer."""
    body = {"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}}
    sockets = [slow_socket(server) for _ in range(8)]
    try:
        for connection in sockets:
            connection.sendall(request_bytes("/generate", body))
        server.wait_for("deepinfer:num_requests_running", 8)
        events = events_of(server, "/v1/completions", TEXT | {"max_tokens": 20})
        assert len(events) == 20
    finally:
        for connection in sockets:
            connection.close()
    server.wait_for("deepinfer:num_requests_running", 0)


def test_a_client_that_closes_its_side_has_gone(server: Server) -> None:
    """Whoever says that nothing more will come is not told the rest either: its cache is free within a step."""
    with slow_socket(server) as connection:
        connection.sendall(request_bytes("/v1/completions", TEXT | {"max_tokens": 900, "stream": True}))
        assert connection.recv(100)
        connection.shutdown(socket.SHUT_WR)
        server.wait_for("deepinfer:num_requests_running", 0)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    assert b"[DONE]" not in received
    assert server.metric("deepinfer:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("path", PATHS)
def test_an_event_may_wait_for_several_tokens(server: Server, path: str) -> None:
    """The first token waits for none, the last event brings the rest."""
    single = [event for event in events_of(server, path, PATHS[path] | {"temperature": 0}) if said(event)]
    asked = PATHS[path] | {"temperature": 0, "stream_interval": 8}
    several = [event for event in events_of(server, path, asked) if said(event)]
    assert "".join(map(said, several)) == "".join(map(said, single))
    # 1 + 4 * 8 + 7 of the forty; in chat every token is an event of its own, but those of a step come together.
    if path == "/v1/completions":
        assert len(several) <= 6 and len(said(several[0])) <= len(said(several[1]))
    for wrong in (0, -1, 2000, "4", 1.5):
        refused = server.http.post(path, json=PATHS[path] | {"stream_interval": wrong})
        assert refused.status_code == 400 and "stream_interval" in refused.text


def test_an_interval_does_not_change_an_answer_that_is_not_streamed(server: Server) -> None:
    one, other = (
        server.http.post("/v1/completions", json=TEXT | {"temperature": 0} | extra).json()["choices"][0]["text"]
        for extra in ({}, {"stream_interval": 16})
    )
    assert one == other


@contextmanager
def endless_answer(chunk: bytes) -> Iterator[tuple[int, list[str]]]:
    """(port of a server that sends chunks for ever, what its application heard)."""
    heard: list[str] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def listen() -> None:
            while True:
                heard.append((await receive())["type"])
                if heard[-1] == "http.disconnect":
                    return

        listening = asyncio.create_task(listen())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not listening.done():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(0.001)

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(answer, http=connection_module.PatientProtocol, lifespan="off", log_level="error")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1], heard
    finally:
        running.should_exit = True
        thread.join()


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "WRITE_SECONDS", 0.5)
    with endless_answer(b"x" * 100_000) as (port, heard), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        deadline = time.monotonic() + 20
        while "http.disconnect" not in heard:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_client_that_reads_slowly_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a little within every WRITE_SECONDS."""
    monkeypatch.setattr(connection_module, "WRITE_SECONDS", 0.6)
    with endless_answer(b"x" * 20_000) as (port, heard), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            assert connection.recv(1 << 16)
            time.sleep(0.001)
        assert "http.disconnect" not in heard
