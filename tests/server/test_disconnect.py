"""A client that goes away frees its request's cache within a step."""

import socket
import time

import pytest

from tests.server.process import KEY, MODEL, Server

LONG = '{"model": "tiny", "prompt": %s, "max_tokens": 900, "ignore_eos": true, "n": %d, "stream": %s}'


def open_request(server: Server, body: str) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall((head + body).encode())
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ['"Once"', '["Once", "Twice", "Thrice"]'], ids=["one", "list"])
@pytest.mark.parametrize("n", [1, 3])
def test_disconnect_aborts_every_sequence(server: Server, stream: bool, prompt: str, n: int) -> None:
    server.wait_for("deepinfer:num_requests_running", 0)
    aborted = server.metric("deepinfer:request_success_total", finished_reason="abort")
    sequences = n * (prompt.count(",") + 1)
    connection = open_request(server, LONG % (prompt, n, str(stream).lower()))
    server.wait_for("deepinfer:num_requests_running", sequences)
    if stream:
        assert b"data:" in connection.recv(65536)
    generated = server.metric("deepinfer:generation_tokens_total")
    connection.close()
    # Far fewer tokens than the rest of the answer: generation stopped because of the disconnect.
    server.wait_for("deepinfer:num_requests_running", 0, seconds=5)
    assert server.metric("deepinfer:generation_tokens_total") - generated < sequences * 600
    server.wait_for("deepinfer:request_success_total", aborted + sequences, finished_reason="abort")
    assert server.metric("deepinfer:kv_cache_usage_perc") == 0


def test_disconnect_while_waiting_and_prefilling(server: Server) -> None:
    """More sequences than the engine holds at once, all with long prompts, cancelled before most have started."""
    prompt = str([[0] + [50 + i] * 900 for i in range(20)])
    connection = open_request(server, f'{{"model": "{MODEL}", "prompt": {prompt}, "max_tokens": 100}}')
    deadline = time.monotonic() + 20
    while server.metric("deepinfer:num_requests_waiting") == 0:
        assert time.monotonic() < deadline
    connection.close()
    server.wait_for("deepinfer:num_requests_waiting", 0)
    server.wait_for("deepinfer:num_requests_running", 0)
    assert server.metric("deepinfer:kv_cache_usage_perc") == 0
    assert server.client.completions.create(model=MODEL, prompt="still here", max_tokens=2).choices
