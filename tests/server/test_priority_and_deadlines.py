"""The fields `priority` and `deadline_seconds` over HTTP: taken, checked by name, and a deadline ends the answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.process import MODEL, Server
from tests.server.test_errors import check_shape

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hello there"}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
LONG = {"temperature": 0, "ignore_eos": True, "max_tokens": 900}


@pytest.mark.parametrize("path", BODIES)
def test_a_request_past_its_deadline_ends_with_what_it_has(server: Server, path: str) -> None:
    whole = server.http.post(path, json=BODIES[path] | LONG).json()
    answer = server.http.post(path, json=BODIES[path] | LONG | {"deadline_seconds": 0.15}).json()
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "deadline")
    assert answer["usage"]["completion_tokens"] < 900
    text, complete = (c["message"]["content"] if "message" in c else c["text"] for c in (choice, whole["choices"][0]))
    assert (complete or "").startswith((text or "").rstrip("\ufffd"))
    server.wait_for("deepinfer:num_requests_running", 0)


@pytest.mark.parametrize("path", BODIES)
def test_an_early_end_makes_no_difference(server: Server, path: str) -> None:
    body = BODIES[path] | {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
    plain = server.http.post(path, json=body).json()["choices"]
    assert server.http.post(path, json=body | {"deadline_seconds": 60, "priority": -3}).json()["choices"] == plain


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", 2**31), ("priority", "high"), ("priority", 1.5), ("deadline_seconds", 0), ("deadline_seconds", -1)],
)
def test_bad_values_are_refused_by_name(server: Server, path: str, name: str, value: object) -> None:
    check_shape(server.http.post(path, json=BODIES[path] | {"max_tokens": 4, name: value}), 400, name)


def test_the_native_route_counts_priorities_upwards(server: Server) -> None:
    """As SGLang does by default; taken or refused by the same limits."""
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    assert server.http.post("/generate", json=body | {"priority": 5}).status_code == 200
    assert server.http.post("/generate", json=body | {"priority": 2**31}).status_code == 400


@pytest.mark.parametrize(("path", "field"), [("/v1/responses", "input"), ("/v1/messages", "messages")])
def test_protocols_without_priorities_refuse_them(server: Server, path: str, field: str) -> None:
    value: object = "hi" if field == "input" else [{"role": "user", "content": "hi"}]
    body = {"model": MODEL, field: value, "max_tokens": 4, "priority": 1}
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400 and "priority" in answer.json()["error"]["message"]
