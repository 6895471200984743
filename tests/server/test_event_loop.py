"""One request, however large, neither stops the server for others nor costs more than it may."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from deepinfer.engine.mailbox import News
from deepinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput
from deepinfer.server import body as body_module
from deepinfer.server import connection as connection_module
from deepinfer.server.connection import FLOW
from deepinfer.server.errors import ApiError
from deepinfer.server.recipe_reader import Events
from deepinfer.server.streams import Answer, EventStream, whole_answer
from deepinfer.server.text_engine import Delta
from deepinfer.server.workers import Workers
from tests.server.process import KEY, MODEL, Server

BOUND = 2.0  # seconds that /health may take; it is a few hundredths on a quiet machine
MIB = 1 << 20
CHAT = "/v1/chat/completions"
TINY = {"role": "user", "content": "a"}


def tools(count: int) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(count)]


def completion(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2} | fields).encode()


def chat(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"model": MODEL, "messages": [TINY], "max_tokens": 2} | fields).encode()


def body(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"model": MODEL} | fields).encode()


def unknown(item: bytes, count: int) -> Callable[[], bytes]:
    """A valid completion with many values in a field that nobody knows."""
    return lambda: completion()()[:-1] + b', "unknown": {"a": [' + b",".join([item] * count) + b"]}}"


# name: (path, body, status, field that the error names)
HEAVY: dict[str, tuple[str, Callable[[], bytes], int, str | None]] = {
    "tokenize-31MB": ("/tokenize", body(prompt="a" * (31 * MIB)), 413, None),
    "tokenize-4MB": ("/tokenize", body(prompt="! a1é" * (MIB // 2)), 400, "prompt"),
    "prompt-7MB": ("/v1/completions", completion(prompt="word " * (7 * MIB // 5)), 400, "prompt"),
    "stops": ("/v1/completions", completion(stop=["a" * (MIB // 4) + str(i) for i in range(16)]), 400, "stop"),
    "stop-sequences": ("/v1/messages", chat(stop_sequences=["a" * 1025]), 400, "stop_sequences"),
    "bad-words": (
        "/v1/completions",
        completion(bad_words=["a" * (MIB // 4) + str(i) for i in range(16)]),
        400,
        "bad_words",
    ),
    "separate-6MB": ("/separate_reasoning", body(text="<｜end▁of▁sentence｜>" * 150_000 + "x"), 400, "text"),
    "chat-messages": (CHAT, chat(messages=[TINY] * 100_000), 400, "messages"),
    "messages-messages": ("/v1/messages", chat(messages=[TINY] * 100_000), 400, "messages"),
    "responses-items": ("/v1/responses", body(input=[TINY] * 100_000), 400, "input"),
    "chat-1MB": (CHAT, chat(messages=[{"role": "user", "content": "word " * (MIB // 5)}]), 400, "messages"),
    "messages-1MB": ("/v1/messages", chat(messages=[{"role": "user", "content": "é" * (MIB // 2)}]), 400, "messages"),
    "responses-1MB": ("/v1/responses", body(input="word " * (MIB // 5)), 400, "input"),
    "tools": (CHAT, chat(tools=tools(16_000)), 400, "tools"),
    "fewer-tools": (CHAT, chat(tools=tools(1000)), 400, "messages"),
    "detokenize": ("/detokenize", body(tokens=[50] * 2_000_000), 400, None),
    "detokenize-fewer": ("/detokenize", body(tokens=[50] * 1_000_000), 400, "tokens"),
    "prompts": ("/v1/completions", completion(prompt=["word " * 800] * 256, max_tokens=99999), 400, "max_tokens"),
    "sequences": ("/v1/completions", completion(prompt=["word"] * 256, n=128), 400, "n"),
    "faults": ("/v1/completions", completion(prompt=["a"] + [1] * 15_000), 400, "prompt"),
    "objects": ("/v1/completions", unknown(b"{}", 2_700_000), 400, None),
    "lists": ("/v1/completions", unknown(b"[]", 2_700_000), 400, None),
    "numbers": ("/v1/completions", unknown(b"1", 4_000_000), 400, None),
    "fewer-objects": ("/v1/completions", unknown(b"{}", 100_000), 200, None),
    "quoted": ("/v1/completions", unknown(b'"{[,\\"{\\\\"', 400_000), 200, None),
}


class Probe:
    """Asks for /health all the time, and runs small completions; keeps the longest waits."""

    def __init__(self, server: Server):
        self.server, self.done = server, threading.Event()
        self.worst = {"health": 0.0, "completion": 0.0}
        self.failures: list[str] = []
        self.threads = [threading.Thread(target=self.ask, args=(kind,)) for kind in self.worst]

    def ask(self, kind: str) -> None:
        with self.server.http as client:
            while not self.done.is_set():
                start = time.monotonic()
                if kind == "health":
                    answer = client.get("/health")
                else:
                    small = {"model": MODEL, "prompt": "A", "max_tokens": 4, "stream": True}
                    answer = client.post("/v1/completions", json=small)
                if answer.status_code != 200 or (kind != "health" and "[DONE]" not in answer.text):
                    self.failures.append(answer.text)
                self.worst[kind] = max(self.worst[kind], time.monotonic() - start)
                time.sleep(0.02)

    def __enter__(self) -> "Probe":
        for thread in self.threads:
            thread.start()
        time.sleep(0.3)  # connections and first answers
        self.worst = dict.fromkeys(self.worst, 0.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        for thread in self.threads:
            thread.join()


def check_error(path: str, answer: httpx.Response, param: str | None) -> None:
    error = answer.json()["error"]
    if path.startswith("/v1/messages"):
        assert set(error) == {"type", "message"}
        assert param is None or param in error["message"]
    else:
        assert set(error) == {"message", "type", "param", "code"}
        assert param is None or (error["param"] or "").split("[")[0].split(".")[0] == param, error
    assert len(answer.content) < 5000


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_request_leaves_the_others_alone(server: Server, name: str) -> None:
    path, make, status, param = HEAVY[name]
    content = make()
    with Probe(server) as probe:
        start = time.monotonic()
        answer = server.http.post(path, content=content)
        seconds = time.monotonic() - start
    print(f"{name}: {seconds:.2f} s, /health {probe.worst['health']:.3f} s, stream {probe.worst['completion']:.3f} s")
    assert answer.status_code == status, answer.text[:500]
    if status != 200:
        check_error(path, answer, param)
    assert not probe.failures
    assert 0 < probe.worst["health"] < BOUND and 0 < probe.worst["completion"] < 2 * BOUND
    assert seconds < 20


def test_many_heavy_requests_at_once_wait_for_each_other(server: Server) -> None:
    """Each is refused only after it was rendered; meanwhile the others go on."""
    messages = [{"role": "user", "content": "a" * 60}, {"role": "assistant", "content": "b"}] * 500
    content = chat(messages=messages)()

    async def all_of_them() -> list[int]:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
            answers = await asyncio.gather(*(client.post(CHAT, content=content) for _ in range(24)))
        return [answer.status_code for answer in answers]

    with Probe(server) as probe:
        statuses = asyncio.run(all_of_them())
    assert statuses == [400] * 24
    assert not probe.failures
    assert 0 < probe.worst["health"] < BOUND and 0 < probe.worst["completion"] < 2 * BOUND


def test_a_long_answer_is_made_beside_the_event_loop() -> None:
    """One with log-probabilities of prompts has megabytes; this one waits for the event loop to go on meanwhile."""
    app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(workers=Workers())))
    went_on = threading.Event()

    async def answer() -> bytes:
        request = Request({"type": "http", "app": app})
        request.state.body_bytes = 0
        asyncio.get_running_loop().call_later(0.01, went_on.set)
        return bytes((await whole_answer(request, lambda: {"went_on": went_on.wait(10)}, True)).body)

    assert json.loads(asyncio.run(answer())) == {"went_on": True}


def test_a_long_event_is_made_beside_the_event_loop() -> None:
    """The first of a stream with log-probabilities of a prompt; what follows it is sent behind it."""
    app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(workers=Workers(), stream_interval=1)))
    went_on = threading.Event()

    class Sequence:
        must_wait = ended = False

        def start(self, deliver: Callable[[News], None]) -> None:
            for token, prompt in ((7, [None]), (8, None), (9, None)):
                reason = "length" if token == 9 else None
                outputs = [CompletionOutput(0, [token], finish_reason=reason)]
                news = RequestOutput("a", [5], outputs, token == 9, RequestMetrics(0.0), None, prompt)
                asyncio.get_running_loop().call_later(0.01 * (token - 6), deliver, news)

        def read(self, news: RequestOutput) -> Delta[str]:
            found = news.outputs[0]
            return Delta(found.token_ids, finish_reason=found.finish_reason, prompt_logprobs=news.prompt_logprobs)

        def close(self) -> None:
            pass

    class Tokens(Answer):
        def add(self, number: int, delta: Delta[str]) -> Events:
            waits = delta.prompt_logprobs is not None
            return [{"tokens": delta.token_ids, "went_on": went_on.wait(10) if waits else None}]

    async def answer() -> list[Any]:
        received: list[bytes] = []

        async def receive() -> Message:
            await asyncio.sleep(20)
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            received.append(message.get("body", b""))

        flow = SimpleNamespace(write_paused=False, drain=lambda: asyncio.sleep(0))
        scope = {"type": "http", "app": app, FLOW: flow}
        request = Request(scope, receive)
        request.state.body_bytes = 0
        asyncio.get_running_loop().call_later(0.1, went_on.set)
        stream = EventStream(request, [Sequence()], Tokens())  # type: ignore[list-item]
        await stream(scope, receive, send)
        return [json.loads(line[6:]) for line in b"".join(received).splitlines() if line.startswith(b"data: {")]

    assert asyncio.run(answer()) == [{"tokens": [7], "went_on": True}, {"tokens": [8, 9], "went_on": None}]


def test_a_long_text_is_encoded_as_a_short_one_is(server: Server) -> None:
    """Above and below what is worth a worker thread; spelled control tokens stay text in both."""
    text = "<｜User｜> over and over, "
    one = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    for padding in ("", "x" * 20_000):
        fields = {"prompt": text, "add_special_tokens": False, "unknown": padding}
        assert server.http.post("/tokenize", json=fields).json()["tokens"] == one
    back = server.http.post("/detokenize", json={"tokens": one * 400}).json()["prompt"]
    assert back == text * 400


def test_sizes_at_the_limit_are_served(server: Server) -> None:
    stops = {"stop": ["z" * 1024] * 16, "n": 8}
    assert server.http.post("/v1/completions", content=completion(**stops)()).status_code == 200
    assert server.http.post("/detokenize", content=body(tokens=[50] * 16384)()).status_code == 200
    assert server.http.post("/detokenize", content=body(tokens=[50] * 16385)()).status_code == 400


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_endless_headers_are_cut_off(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n")
        with pytest.raises(OSError):
            for number in range(4000):
                connection.sendall(b"X-Header-%d: %s\r\n" % (number, b"a" * 1000))
                if b"400" in peek(connection):
                    raise ConnectionError
    assert server.http.get("/health").status_code == 200


def peek(connection: socket.socket) -> bytes:
    connection.setblocking(False)
    try:
        return connection.recv(1000)
    except BlockingIOError:
        return b""
    finally:
        connection.settimeout(30)


def test_bad_requests_do_not_flood_the_log(server: Server) -> None:
    for _ in range(20):
        with connect(server) as connection:
            connection.sendall(b"no http at all\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 400")
    time.sleep(0.2)
    assert sum("Invalid HTTP request" in line for line in server.log) <= 2


def test_a_body_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODY_SECONDS", 0.1)

    async def trickle() -> Message:
        await asyncio.sleep(0.03)
        return {"type": "http.request", "body": b" ", "more_body": True}

    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, trickle)
    with pytest.raises(ApiError) as refused:
        asyncio.run(body_module._receive(request, 1000))
    assert refused.value.status == 408


@contextmanager
def listening(seconds: float) -> Iterator[int]:
    """The port of a server that takes `seconds` for an answer."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(seconds)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(answer, http=connection_module.PatientProtocol, lifespan="off", log_level="error")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        running.should_exit = True
        thread.join()


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"], ids=["first", "second"])
@pytest.mark.parametrize("started", [b"G", b"GET / HTTP/1.1\r\nHost: a\r\n"])
def test_headers_that_do_not_arrive_are_given_up(
    monkeypatch: pytest.MonkeyPatch, before: bytes, started: bytes
) -> None:
    """On a new connection, and on one that has been of use before; answers may take longer than headers."""
    monkeypatch.setattr(connection_module, "HEADER_SECONDS", 0.4)
    with listening(0.6) as port, socket.create_connection(("127.0.0.1", port), timeout=4) as connection:
        if before:
            connection.sendall(before)
            received = b""
            while not received.endswith(b"ok"):
                received += connection.recv(1000)
        connection.sendall(started)
        start = time.monotonic()
        assert connection.recv(1000) == b""
        assert time.monotonic() - start > 0.2
