"""The server and its engine process: either may die, signals drain, and a full queue is a 429."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from deepinfer.server.admission import Admission, Limits
from deepinfer.server.errors import ApiError
from deepinfer.server.metrics import Metrics
from deepinfer.server.running import Ticket
from tests.server.process import MODEL, Server, lines_of, start_server

LONG = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1000, "ignore_eos": True, "stream": True}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 900, "stream": True}
MESSAGE = CHAT | {"max_tokens": 900}

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")


@pytest.fixture(scope="module")
def small(checkpoint: Path) -> Iterator[Server]:
    """Runs one sequence at a time and lets one wait."""
    running = start_server(checkpoint, "--served-model-name", MODEL, "--max-num-seqs", "1", "--max-queue", "1")
    yield running
    engine = engine_of(running)
    running.process.terminate()
    assert running.process.wait(timeout=30) in (0, -signal.SIGTERM)
    assert not is_alive(engine)
    assert not any("Traceback" in line for line in running.log), "".join(running.log)


def engine_of(server: Server) -> int:
    pid = server.process.pid
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
        if b"deepinfer.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    assert len(children) == 1
    return children[0]


def is_alive(pid: int) -> bool:
    """A zombie that init has not waited for yet is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Streaming:
    """A streamed request in a thread; `events` are its data lines, `started` is set by the first."""

    def __init__(self, server: Server, path: str, body: dict):
        self.events: list[dict] = []
        self.started, self.leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(f"{server.url}{path}", body))
        self._thread.start()

    def _run(self, url: str, body: dict) -> None:
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            self.status = answer.status_code
            for line in lines_of(answer):
                if line.startswith("data: {"):
                    self.events.append(json.loads(line[6:]))
                    self.started.set()
                if self.leave.is_set():
                    return

    def join(self) -> list[dict]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.events


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", LONG), ("/v1/chat/completions", CHAT), ("/v1/messages", MESSAGE)]
)
def test_a_killed_engine(small: Server, path: str, body: dict) -> None:
    """The client of a stream is told so, /ready is 503 until the engine is back, and then all is as before."""
    restarts = small.metric("deepinfer:engine_restarts")
    stream = Streaming(small, path, body | {"ignore_eos": True})
    assert stream.started.wait(30)
    waiting = threading.Thread(target=lambda: answers.append(post(small, "/v1/completions", LONG | {"stream": False})))
    answers: list[httpx.Response] = []
    waiting.start()
    small.wait_for("deepinfer:num_requests_waiting", 1)
    engine = engine_of(small)
    os.kill(engine, signal.SIGKILL)
    assert "engine stopped" in stream.join()[-1]["error"]["message"]
    waiting.join(30)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["type"] == "server_error"
    ready = httpx.get(f"{small.url}/ready")
    assert ready.status_code == 503 and "starting" in ready.text and int(ready.headers["retry-after"]) > 0
    assert httpx.get(f"{small.url}/health_generate").status_code == 503
    assert httpx.get(f"{small.url}/health").status_code == 200
    assert post(small, path, body).status_code == 503
    wait_for(lambda: httpx.get(f"{small.url}/ready").status_code == 200)
    assert httpx.get(f"{small.url}/health_generate").status_code == 200
    assert post(small, path, body | {"stream": False, "max_tokens": 3}).status_code == 200
    assert not is_alive(engine) and engine_of(small) != engine
    assert small.metric("deepinfer:engine_restarts") == restarts + 1
    assert small.metric("deepinfer:kv_cache_usage_perc") == 0


def post(server: Server, path: str, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def test_a_full_queue_is_a_429(small: Server) -> None:
    wait_for(lambda: httpx.get(f"{small.url}/ready").status_code == 200)
    refused = small.metric("deepinfer:requests_rejected_total", reason="queue_full")
    running, waiting = Streaming(small, "/v1/completions", LONG), Streaming(small, "/v1/completions", LONG)
    small.wait_for("deepinfer:num_requests_waiting", 1)
    answer = post(small, "/v1/chat/completions", CHAT)
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error" and answer.json()["error"]["code"] == "queue_full"
    answer = post(small, "/v1/messages", MESSAGE)
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == "rate_limit_error"
    assert small.metric("deepinfer:requests_rejected_total", reason="queue_full") == refused + 2
    assert small.metric("deepinfer:num_requests_waiting") == 1  # no queue grew
    for stream in (running, waiting):
        stream.leave.set()
        stream.join()
    small.wait_for("deepinfer:num_requests_running", 0)
    assert post(small, "/v1/completions", LONG | {"stream": False, "max_tokens": 2}).status_code == 200


def test_a_killed_server_takes_its_engine_with_it(checkpoint: Path) -> None:
    """Also in the middle of a step."""
    server = start_server(checkpoint, "--served-model-name", MODEL)
    engine = engine_of(server)
    stream = threading.Thread(target=lambda: pytest.raises(httpx.HTTPError, post, server, "/v1/completions", LONG))
    stream.start()
    server.wait_for("deepinfer:num_requests_running", 1)
    server.process.kill()
    server.process.wait(10)
    wait_for(lambda: not is_alive(engine), 10)
    stream.join(10)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_drains(checkpoint: Path, sent: signal.Signals) -> None:
    """As a terminal or a service manager sends it, the engine included."""
    command = [sys.executable, "-c", "import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"]
    server = start_server(checkpoint, "--served-model-name", MODEL, prefix=command)
    engine = engine_of(server)
    stream = Streaming(server, "/v1/completions", LONG | {"max_tokens": 300})
    assert stream.started.wait(30)
    os.killpg(server.process.pid, sent)
    assert sum(len(event["choices"][0]["text"]) >= 0 for event in stream.join() if event["choices"]) > 1
    assert stream.events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(30) in (0, 130, -sent)
    wait_for(lambda: not is_alive(engine), 5)


def test_a_bad_checkpoint_is_one_line_and_exit_code_2(checkpoint: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    shard = next(broken.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    command = [sys.executable, "-m", "deepinfer.cli", "serve", "--port", "0", "--model", str(broken)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2 and answer.stdout == ""
    *said, error = answer.stderr.strip().split("\n")
    assert error.startswith("error: ") and shard.name in error and all(line.startswith("INFO") for line in said)


def ticket(owner: str, name: str) -> Ticket:
    return Ticket(owner, "same", name, 0.0)


def test_concurrency_of_a_key() -> None:
    admission = Admission(Limits(max_concurrency_per_key=2), Metrics("m"))
    first = admission.admit(ticket("a", "1"), 3)  # n = 3 is one request
    admission.admit(ticket("a", "never started"), 1)  # nobody holds its place
    second = admission.admit(ticket("a", "2"), 1)
    with pytest.raises(ApiError) as refused:
        admission.admit(ticket("a", "3"), 1)
    assert refused.value.status == 429 and refused.value.code == "key_concurrency"
    assert len(admission.admit(ticket("b", "4"), 1)) == 1
    for place in first:
        assert len(admission) >= 2
        place.leave()
    assert len(admission.admit(ticket("a", "3"), 1)) == 1
    assert len(second) == 1


def test_a_name_that_every_request_carries_is_no_way_around_the_limit() -> None:
    admission = Admission(Limits(max_concurrency_per_key=2), Metrics("m"))
    held = [admission.admit(ticket("a", str(number)).renamed("same"), 1) for number in range(2)]
    with pytest.raises(ApiError) as refused:
        admission.admit(ticket("a", "3").renamed("same"), 1)
    assert refused.value.code == "key_concurrency" and len(held) == 2


def test_rate_of_a_key() -> None:
    now = 100.0
    admission = Admission(Limits(rate_limit=6), Metrics("m"), clock=lambda: now)
    for number in range(6):
        admission.admit(ticket("a", str(number)), 1)
    with pytest.raises(ApiError) as refused:
        admission.admit(ticket("a", "7"), 1)
    assert refused.value.code == "key_rate" and refused.value.retry_after == 10
    admission.admit(ticket("b", "1"), 1)
    now += refused.value.retry_after
    admission.admit(ticket("a", "7"), 1)
    with pytest.raises(ApiError):
        admission.admit(ticket("a", "8"), 1)
    now += 3600
    for number in range(6):  # the allowance does not pile up beyond one minute's
        admission.admit(ticket("a", str(number)), 1)
    with pytest.raises(ApiError):
        admission.admit(ticket("a", "9"), 1)


async def _count_tokens(url: str, number: int) -> int:
    """Completion tokens of one stream, as its pieces carry them."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(LONG | {"prompt": [5, 4 + number % 500], "max_tokens": 8, "return_token_ids": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    answer = (await reader.read()).decode()
    writer.close()
    assert answer.startswith("HTTP/1.1 200") and "data: [DONE]" in answer, answer[:500]
    events = [json.loads(event) for event in re.findall(r"data: (\{.*\})", answer)]
    return sum(len(event["choices"][0]["token_ids"]) for event in events)


@pytest.mark.slow
def test_a_thousand_streams_at_once(checkpoint: Path) -> None:
    """None is refused, none is lost, all get every token; the files that they keep open are within the limit."""
    server = start_server(checkpoint, "--served-model-name", MODEL, "--max-num-seqs", "64", "--max-queue", "1000")

    async def main() -> list[int]:
        streams = [asyncio.create_task(_count_tokens(server.url, number)) for number in range(1000)]
        counts = await asyncio.gather(*streams)
        return list(counts)

    try:
        assert asyncio.run(asyncio.wait_for(main(), 280)) == [8] * 1000
        assert server.metric("deepinfer:request_success_total", finished_reason="length") == 1000
        assert server.metric("deepinfer:kv_cache_usage_perc") == 0
    finally:
        server.process.terminate()
        server.process.wait(30)
