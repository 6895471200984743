"""At most so many tokens of reasoning: thinking_token_budget of vLLM, thinking.budget_tokens of Messages."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.server.process import MODEL, Server

USER = {"role": "user", "content": "Tell me about the sea."}
CHAT: dict[str, Any] = {"model": "nano", "messages": [USER], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
END = 8180  # </think> of nano, which it would never say here
THINKING = CHAT | {"thinking": {"type": "enabled"}, "logit_bias": {str(END): -100}}
SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "days", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "wait", "parameters": SCHEMA, "strict": True}}


def token_ids(server: Server, body: dict[str, Any]) -> list[int]:
    answer = server.http.post("/v1/chat/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def free(nano: Server) -> list[int]:
    """The greedy output without a budget, which is still reasoning at its end."""
    prompt = nano.http.post("/v1/chat/completions/render", json=CHAT).json()["token_ids"]
    assert prompt[-1] == END  # a turn that does not think begins behind it
    found = token_ids(nano, THINKING)
    assert END not in found
    return found


@pytest.mark.parametrize("budget", [0, 5])
def test_reasoning_ends_with_its_budget(nano: Server, free: list[int], budget: int) -> None:
    asked = THINKING | {"thinking_token_budget": budget}
    found = token_ids(nano, asked)
    assert found[:budget] == free[:budget] and found[budget] == END and len(found) == 24
    whole = nano.http.post("/v1/chat/completions", json=asked).json()
    message = whole["choices"][0]["message"]
    assert message["content"] and bool(message["reasoning_content"]) == bool(budget)
    response = THINKING | {"input": USER["content"], "reasoning": {"effort": "high"}, "max_output_tokens": 24}
    del response["max_tokens"], response["messages"], response["thinking"]
    items = nano.http.post("/v1/responses", json=response | {"thinking_token_budget": budget}).json()["output"]
    assert items[-1]["type"] == "message"
    with nano.http.stream("POST", "/v1/chat/completions", json=asked | {"stream": True}) as stream:
        lines = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    content = "".join(line["choices"][0]["delta"].get("content") or "" for line in lines)
    assert content == message["content"]


@pytest.mark.parametrize("budget", [24, 1000])
def test_a_budget_that_is_not_reached_changes_nothing(nano: Server, free: list[int], budget: int) -> None:
    assert token_ids(nano, THINKING | {"thinking_token_budget": budget}) == free


def test_an_answer_without_reasoning_has_no_budget(nano: Server) -> None:
    assert token_ids(nano, CHAT | {"thinking_token_budget": 2}) == token_ids(nano, CHAT)


def test_messages_say_it_in_their_own_words(nano: Server, free: list[int]) -> None:
    body = THINKING | {"thinking": {"type": "enabled", "budget_tokens": 5}}
    thinking, text = nano.http.post("/v1/messages", json=body).json()["content"]
    assert thinking["type"] == "thinking" and text["type"] == "text"
    expected = nano.http.post("/v1/chat/completions", json=THINKING | {"thinking_token_budget": 5}).json()
    message = expected["choices"][0]["message"]
    assert thinking["thinking"] == message["reasoning_content"] and text["text"] == message["content"]


def test_the_format_of_the_answer_holds_behind_it(nano: Server) -> None:
    asked = THINKING | {"thinking_token_budget": 4, "max_tokens": 60, "ignore_eos": False}
    found = nano.http.post("/v1/chat/completions", json=asked | {"response_format": FORMAT}).json()["choices"][0]
    assert found["finish_reason"] == "stop" and found["message"]["reasoning_content"]
    jsonschema.validate(json.loads(found["message"]["content"]), SCHEMA)
    found = nano.http.post("/v1/chat/completions", json=asked | {"tools": [TOOL], "tool_choice": "required"}).json()
    (call,) = found["choices"][0]["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"thinking_token_budget": -1}, "thinking_token_budget"),
        ("/v1/chat/completions", {"thinking_token_budget": "5"}, "thinking_token_budget"),
        ("/v1/chat/completions", {"thinking_token_budget": 5, "golden_token_ids": [7] * 24}, "thinking_token_budget"),
        ("/v1/completions", {"thinking_token_budget": 5, "prompt": "x"}, "thinking_token_budget"),
        ("/v1/messages", {"thinking_token_budget": 5}, "thinking_token_budget"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking"),
    ],
)
def test_what_is_refused_is_named(server: Server, path: str, fields: dict[str, Any], param: str) -> None:
    answer = server.http.post(path, json=THINKING | {"model": MODEL, "ignore_eos": False} | fields)
    assert answer.status_code == 400 and param in answer.json()["error"]["message"]
