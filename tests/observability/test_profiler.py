"""Traces over HTTP from a running engine: the file is a Chrome trace of the engine's own thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.async_engine import AsyncEngine
from deepinfer.engine.engine import Engine
from deepinfer.observability.profiler import ProfilerServer, TraceCapture
from deepinfer.params import SamplingParams
from tests.engine.toy_model import ToyRunner

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("DEEPINFER_PROFILER_PORT", "0")
    monkeypatch.setenv("DEEPINFER_PROFILER_DIR", str(tmp_path / "traces"))
    engine = Engine(ToyRunner(40, 8, 4), EngineConfig(block_size=8, num_blocks=40, max_num_seqs=4))
    yield engine
    engine.observer.close()


def url(engine: Engine, path: str) -> str:
    assert engine.observer.profiler is not None
    host, port = engine.observer.profiler.address
    assert host == "127.0.0.1"
    return f"http://{host}:{port}{path}"


def events(path: str) -> list[dict]:
    return json.loads(Path(path).read_text())["traceEvents"]


def count(path: str, operator: str) -> int:
    return sum(event.get("name") == operator for event in events(path))


def test_exactly_the_asked_steps_are_recorded(engine: Engine) -> None:
    engine.add_request("a", [1, 2, 3], PARAMS)
    engine.step()
    assert httpx.post(url(engine, "/start_profile?steps=5")).json() == {"state": "starting"}
    while engine.has_unfinished_requests():
        engine.step()
    status = httpx.get(url(engine, "/status")).json()
    assert status["state"] == "idle"
    # Greedy sampling takes one maximum over the logits a step.
    assert count(status["latest"], "aten::max") == 5
    assert httpx.post(url(engine, "/stop_profile")).status_code == 400


def test_start_and_stop(engine: Engine) -> None:
    engine.add_request("a", [1, 2, 3], PARAMS)
    httpx.post(url(engine, "/start_profile"))
    second = httpx.post(url(engine, "/start_profile"))
    assert second.status_code == 400 and "under way" in second.json()["error"]
    for _ in range(7):
        engine.step()
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(url(engine, "/stop_profile"), timeout=60)))
    thread.start()
    while thread.is_alive():
        engine.step()
        time.sleep(0.01)
    assert count(answers[0].json()["trace"], "aten::max") >= 7


def test_an_idle_engine_starts_and_stops_at_once(engine: Engine) -> None:
    running, status = AsyncEngine(engine), url(engine, "/status")
    try:
        httpx.post(url(engine, "/start_profile"))
        answer = httpx.post(url(engine, "/stop_profile"), timeout=60)
        assert answer.status_code == 200 and Path(answer.json()["trace"]).is_file()
    finally:
        running.close()
    with pytest.raises(httpx.TransportError):  # the endpoint went with the engine
        httpx.get(status)


@pytest.mark.parametrize("steps", ["?steps=3", ""])
def test_a_trace_that_cannot_be_written_costs_nothing_but_itself(engine: Engine, tmp_path: Path, steps: str) -> None:
    (tmp_path / "file").write_text("")
    engine.observer.capture.directory = tmp_path / "file" / "traces"
    running = AsyncEngine(engine)
    try:
        httpx.post(url(engine, f"/start_profile{steps}"))
        asyncio.run(_generate(running, "a"))
        if not steps:
            answer = httpx.post(url(engine, "/stop_profile"), timeout=60)
            assert answer.status_code == 500 and "could not be written" in answer.json()["error"]
        status = httpx.get(url(engine, "/status")).json()
        assert status["state"] == "idle" and "could not be written" in status["error"]
        engine.observer.capture.directory = tmp_path / "traces"
        httpx.post(url(engine, "/start_profile"))
        asyncio.run(_generate(running, "b"))
        answer = httpx.post(url(engine, "/stop_profile"), timeout=60)
        assert answer.status_code == 200 and Path(answer.json()["trace"]).is_file()
        assert engine.observer.stats.totals["output"] == 80  # statistics went on
    finally:
        running.close()


async def _generate(running: AsyncEngine, request_id: str) -> None:
    async for output in running.generate(request_id, [1, 2, 3], PARAMS):
        assert output.error is None


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/start_profile?steps=0", 400),
        ("/start_profile?steps=-1", 400),
        ("/start_profile?steps=x", 400),
        ("/start_profile?steps=99999999999999999999", 400),
        ("/stop_profile", 400),
        ("/elsewhere", 404),
    ],
)
def test_bad_requests(engine: Engine, path: str, status: int) -> None:
    answer = httpx.post(url(engine, path))
    assert answer.status_code == status and answer.json()["error"]
    assert httpx.get(url(engine, "/status")).json() == {"state": "idle", "latest": None}


def test_web_pages_are_refused(engine: Engine) -> None:
    answer = httpx.post(url(engine, "/start_profile"), headers={"Origin": "http://evil.example"})
    assert answer.status_code == 403
    assert engine.observer.capture.state == "idle"


def test_without_a_port_there_is_no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPINFER_PROFILER_PORT", raising=False)
    engine = Engine(ToyRunner(40, 8, 4), EngineConfig(block_size=8, num_blocks=40, max_num_seqs=4))
    assert engine.observer.profiler is None


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    first = ProfilerServer(TraceCapture(tmp_path), "127.0.0.1", 0)
    try:
        with pytest.raises(ValueError, match=f"127.0.0.1:{first.address[1]}"):
            ProfilerServer(TraceCapture(tmp_path), *first.address)
    finally:
        first.close()
