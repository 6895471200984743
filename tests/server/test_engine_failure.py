"""When the engine fails or dies, requests are answered without a traceback and /health says so."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from deepinfer.config.engine import EngineConfig
from deepinfer.server.app import create_app
from deepinfer.server.metrics import Metrics
from deepinfer.server.state import ServerState
from deepinfer.server.text_engine import TextEngine, load_text_engine

BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def text_engine(checkpoint: Path) -> TextEngine:
    return load_text_engine(str(checkpoint), EngineConfig(max_num_seqs=4), "tiny")


@pytest.fixture
def client(text_engine: TextEngine) -> Iterator[TestClient]:
    app = create_app(ServerState(text_engine, Metrics("tiny")))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def fail_at_step(text_engine: TextEngine, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The model's `step`-th run from now on raises."""
    runner = text_engine.engine._engine.runner
    run, count = runner.run, 0

    def failing(inputs):  # type: ignore[no-untyped-def]
        nonlocal count
        count += 1
        if count == step:
            raise RuntimeError("secret detail of /some/file.py")
        return run(inputs)

    monkeypatch.setattr(runner, "run", failing)


def test_a_failed_step_fails_its_requests_only(
    client: TestClient, text_engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = client.post("/v1/completions", json=BODY | {"temperature": 0}).json()["choices"][0]["text"]
    fail_at_step(text_engine, monkeypatch, 4)
    answer = client.post("/v1/completions", json=BODY)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error" and "secret" not in answer.text
    assert client.get("/health").status_code == 200
    after = client.post("/v1/completions", json=BODY | {"temperature": 0})
    assert after.json()["choices"][0]["text"] == before
    metrics = client.get("/metrics").text
    assert 'deepinfer:request_success_total{engine="0",finished_reason="error",model_name="tiny"} 1.0' in metrics
    assert 'deepinfer:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0' in metrics


def test_a_failed_step_ends_a_stream_with_an_error_event(
    client: TestClient, text_engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at_step(text_engine, monkeypatch, 4)
    answer = client.post("/v1/completions", json=BODY | {"stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert answer.status_code == 200 and events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["type"] == "server_error" and "secret" not in answer.text
    assert all("choices" in json.loads(event) for event in events[:-2])


def test_a_dead_engine_is_reported(client: TestClient, text_engine: TextEngine) -> None:
    text_engine.engine.close()
    for path in ("/health", "/ping"):
        assert client.get(path).status_code == 503
    for body in (BODY, BODY | {"stream": True}):
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"
    assert client.get("/metrics").status_code == 200


def test_spark_358_health_is_not_green_while_nothing_can_be_generated(
    client: TestClient, text_engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model gives no finite logits: the process lives, but /health_generate says what clients see."""
    assert client.get("/health_generate").status_code == 200
    runner = text_engine.engine._engine.runner
    run = runner.run
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", lambda inputs: run(inputs) * float("nan"))
        assert client.get("/health_generate").status_code == 503
        assert client.post("/v1/completions", json=BODY).status_code == 500
        assert client.get("/health").status_code == 200
    assert client.get("/health_generate").status_code == 200
