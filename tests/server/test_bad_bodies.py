"""Every kind of bad body, to each of the four protocols: an answer in the protocol's own error shape, never a 5xx."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.process import KEY, MODEL, Server

HELLO = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
}
CONTENT = {"/v1/completions": "prompt", "/v1/responses": "input"}  # the others: messages
MEGABYTES = 100
EOS = 1
pytestmark = pytest.mark.parametrize("path", BODIES)


def check_error(path: str, answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    if path == "/v1/messages":
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text and body["error"]["message"]
    return body["error"]


def post(server: Server, path: str, content: bytes | Iterator[bytes]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    return httpx.post(server.url + path, content=content, headers=headers, timeout=60)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"nonsense", b'{"model": ', b"{'model': 1}", b'{"model": NaN}', b'{"a": 1,}',
        b"null", b"[]", b"3", b'"x"',
        b'{"model": "\xff\xfe"}', b"\x00", b'{"model": "\xed\xa0\x80"}', b'{"model": "\\ud800"}',
    ],
)  # fmt: skip
def test_no_json(server: Server, path: str, content: bytes) -> None:
    check_error(path, post(server, path, content), 400)


@pytest.mark.parametrize("wrong", [5, "text", [], {}, True, None, [[1]], {"a": 1}, [None], 1.5])
@pytest.mark.parametrize("field", ["model", "content", "limit", "temperature", "stop"])
def test_wrong_types(server: Server, path: str, field: str, wrong: Any) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    stop = "stop_sequences" if path == "/v1/messages" else "stop"
    name = {"content": CONTENT.get(path, "messages"), "limit": limit, "stop": stop}.get(field, field)
    soon = {"allowed_token_ids": [EOS]} if (field, wrong) == ("limit", None) else {}  # no limit, and an early end
    answer = server.http.post(path, json={"model": MODEL, **BODIES[path], name: wrong} | soon)
    if answer.status_code != 200:  # null is no value, a text or a list of token IDs is a prompt
        check_error(path, answer, 404 if field == "model" and isinstance(wrong, str) else 400)
    else:
        assert wrong is None or (field, wrong) in [("limit", 5), ("content", "text"), ("stop", "text"), ("stop", []),
                                                   ("content", [[1]]), ("temperature", 1.5),
                                                   ("temperature", 5)]  # fmt: skip


@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 400, "1" + "0" * 30, "-0.0e-999", "1e-400", "9" * 100_000])
@pytest.mark.parametrize("field", ["temperature", "top_p", "seed", "max_tokens", "max_output_tokens", "unknown"])
def test_huge_numbers(server: Server, path: str, field: str, number: str) -> None:
    body = json.dumps({"model": MODEL, **BODIES[path], field: "HERE"}).replace('"HERE"', number)
    answer = post(server, path, body.encode())
    if answer.status_code != 200:
        check_error(path, answer, 400)


@pytest.mark.parametrize("depth", [130, 5_000, 200_000])
@pytest.mark.parametrize("opening,closing", [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("field", ["content", "tools", "unknown"])
def test_deep_nesting(server: Server, path: str, field: str, opening: str, closing: str, depth: int) -> None:
    name = CONTENT.get(path, "messages") if field == "content" else field
    body = json.dumps({"model": MODEL, **BODIES[path], name: "HERE"})
    answer = post(server, path, body.replace('"HERE"', opening * depth + "1" + closing * depth).encode())
    if answer.status_code != 200:
        check_error(path, answer, 400)
    else:
        assert field == "unknown" or path == "/v1/completions" and field == "tools"


@pytest.mark.parametrize("announced", [True, False])
def test_a_hundred_megabytes(server: Server, path: str, announced: bool) -> None:
    """Refused without being read: at once if the length is announced, else at the limit."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    megabyte = b"x" * (1 << 20)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        length = f"Content-Length: {MEGABYTES << 20}" if announced else "Transfer-Encoding: chunked"
        connection.sendall(f"{head}{length}\r\n\r\n".encode())
        sent = 0
        try:
            for _ in range(MEGABYTES):
                connection.sendall(megabyte if announced else b"%x\r\n%s\r\n" % (len(megabyte), megabyte))
                sent += 1
        except OSError:  # the server has hung up
            pass
        received = b""
        try:
            while part := connection.recv(1 << 16):
                received += part
                if b"}" in part:
                    break
        except OSError:
            assert received, "the answer came before the connection was closed"
    assert received.startswith(b"HTTP/1.1 413"), received[:200]
    answer = httpx.Response(413, content=received.partition(b"\r\n\r\n")[2])
    check_error(path, answer, 413)
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_unknown_model_and_unknown_field(server: Server, path: str) -> None:
    error = check_error(path, server.http.post(path, json={**BODIES[path], "model": "no-such-model"}), 404)
    assert "no-such-model" in error["message"]
    missing = check_error(path, server.http.post(path, json=BODIES[path]), 400)
    assert "model" in missing["message"]
    answer = server.http.post(path, json={"model": MODEL, **BODIES[path], "no_such_field": {"a": [1]}})
    assert answer.status_code == 200, "as with OpenAI-compatible servers, a field that nobody knows is ignored"
