"""Every bad input is a 4xx in OpenAI's error shape that names the field, and harms nothing else."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.process import KEY, MODEL, Server

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 2}


def check_shape(answer: httpx.Response, status: int, param: str | None = None) -> dict:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"]
    if param is not None:
        assert error["param"] is not None and error["param"].split(".")[0].split("[")[0] == param, error
    return error


SAMPLING_FAULTS = [
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_tokens", "ten"),
    ("max_tokens", 10**30),
    ("max_tokens", 5000),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", [1]),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 0.5),
    ("min_p", 2),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("seed", -1),
    ("seed", 2**64),
    ("n", 0),
    ("n", 10**9),
    ("stop", [""]),
    ("stop", ["a"] * 17),
    ("stop", 5),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [512]),
    ("stop_token_ids", [-1]),
    ("min_tokens", -1),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 1000}),
    ("logit_bias", {"512": 1}),
    ("logit_bias", [1]),
    ("ignore_eos", "yes"),
    ("stream", "yes"),
    ("stream_options", 1),
    ("best_of", 3),
    ("use_beam_search", True),
    ("prompt_logprobs", 21),
    ("structured_outputs", {"regex": "a", "json": "{}"}),
    ("include_stop_str_in_output", "yes"),
]


@pytest.mark.parametrize(("name", "value"), SAMPLING_FAULTS, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_sampling_fields(server: Server, path: str, name: str, value: object, stream: bool) -> None:
    body = (CHAT if "chat" in path else COMPLETION) | {"stream": stream} | {name: value}
    check_shape(server.http.post(path, json=body), 400, name)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_numbers_that_are_none(server: Server, name: str, value: str) -> None:
    raw = json.dumps(COMPLETION)[:-1] + f', "{name}": {value}}}'
    check_shape(server.http.post("/v1/completions", content=raw), 400)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [50] * 1024}, "prompt"),
        ({"prompt": "word " * 3000}, "prompt"),
        ({"prompt": [50] * 1020, "max_tokens": 10}, "max_tokens"),
        ({"prompt": ["a"] * 1000}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"stream_options": {"include_usage": "yes"}, "stream": True}, "stream_options"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_completion_fields(server: Server, change: dict, param: str) -> None:
    check_shape(server.http.post("/v1/completions", json=COMPLETION | change), 400, param)


USER = {"role": "user", "content": "hi"}
UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
STRICT = {"type": "object", "properties": {"a": UNIQUE}, "required": ["a"], "additionalProperties": False}
PNG = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "1"}]}, None),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": "hammer"}, "tools"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"thinking": {"type": "perhaps"}}, "thinking"),
        ({"chat_template": "x"}, "chat_template"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": STRICT}}]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}]}, "messages"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_chat_fields(server: Server, change: dict, param: str | None) -> None:
    check_shape(server.http.post("/v1/chat/completions", json=CHAT | change), 400, param)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"5", b'"text"', b"\xff\xfe{}", b"[" * 100_000, b'{"model": "\\ud800"}', b"{'a': 1}"],
    ids=["empty", "open", "list", "null", "number", "text", "utf16", "deep", "surrogate", "quotes"],
)
def test_bodies_that_are_no_json_object(server: Server, path: str, raw: bytes) -> None:
    check_shape(server.http.post(path, content=raw), 400)


def test_a_huge_body_is_refused(server: Server) -> None:
    check_shape(server.http.post("/v1/completions", content=b" " * (33 << 20)), 413)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_unknown_model(server: Server, path: str) -> None:
    body = (CHAT if "chat" in path else COMPLETION) | {"model": "other"}
    error = check_shape(server.http.post(path, json=body), 404, "model")
    assert error["code"] == "model_not_found" and "tiny" in error["message"]
    with pytest.raises(openai.NotFoundError):
        server.client.completions.create(model="other", prompt="hi")


def test_unknown_fields_are_ignored(server: Server) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        answer = server.http.post(path, json=body | {"no_such_field": {"a": [1]}, "user": "me"})
        assert answer.status_code == 200, answer.text


def test_unknown_paths_and_methods(server: Server) -> None:
    check_shape(server.http.get("/v1/nothing"), 404)
    check_shape(server.http.get("/v1/chat/completions"), 405)
    check_shape(server.http.delete("/v1/models"), 405)
    assert check_shape(server.http.get("/v1/models/other"), 404, "model")["code"] == "model_not_found"


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {KEY}", KEY, "Bearer", f"Bearer {KEY}x"])
def test_the_key_guards_everything_but_health_and_metrics(server: Server, header: str | None) -> None:
    headers = {"Authorization": header} if header else {}
    for method, path in [
        ("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"),
        ("POST", "/detokenize"), ("POST", "/v1/chat/completions/render"), ("GET", "/version"), ("GET", "/nothing"),
        ("GET", "/docs"), ("GET", "/openapi.json"), ("POST", "/v1/responses"), ("GET", "/v1/responses/resp_1"),
        ("POST", "/abort_requests"), ("GET", "/load"), ("GET", "/server_info"), ("GET", "/health_generate"),
    ]:  # fmt: skip
        check_shape(httpx.request(method, server.url + path, headers=headers), 401)
    for path in ("/health", "/ping", "/ready", "/metrics"):
        assert httpx.get(server.url + path, headers=headers).status_code == 200


def test_errors_leave_a_running_stream_alone(server: Server) -> None:
    whole = server.client.completions.create(model=MODEL, prompt="A", temperature=0, max_tokens=64).choices[0].text
    text = ""
    for number, chunk in enumerate(
        server.client.completions.create(model=MODEL, prompt="A", temperature=0, max_tokens=64, stream=True)
    ):
        text += chunk.choices[0].text
        if number % 8 == 0:
            check_shape(server.http.post("/v1/completions", json=COMPLETION | {"prompt": [9999]}), 400)
    assert text == whole
    assert server.metric("deepinfer:num_requests_running") == 0
