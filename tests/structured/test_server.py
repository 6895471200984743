"""Structured output over HTTP: the protocols' own clients, vLLM's and SGLang's fields, and what is refused, by name."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.server.process import KEY, Server, start_server
from tests.structured.grammars import NANO, REPEATED

pytestmark = pytest.mark.skipif(
    not list(NANO.glob("*.safetensors")), reason="the nano weights are not in this checkout"
)
USER: Any = [{"role": "user", "content": "Write a long poem about the sea. No JSON, no numbers."}]
OFF = {"thinking": {"type": "disabled"}}
ON = {"thinking": {"type": "enabled"}}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


GREEDY: Any = {"temperature": 0}  # drawn answers may go on past max_tokens


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start_server(NANO, "--served-model-name", "nano", "--api-key", KEY, "--max-num-seqs", "8")
    yield running
    running.process.terminate()
    assert running.process.wait(timeout=30) in (0, -15)
    assert not any("Traceback" in line for line in running.log), "".join(running.log)


def function(strict: bool = True, parameters: Any = PARAMETERS) -> Any:
    return {"type": "function", "function": {"name": "get_weather", "parameters": parameters, "strict": strict}}


def check_arguments(arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), PARAMETERS)


@pytest.mark.parametrize("thinking", [OFF, ON], ids=["plain", "thinking"])
def test_chat_parse_helper(server: Server, thinking: Any) -> None:
    answer = server.client.chat.completions.parse(
        model="nano", messages=USER, response_format=Person, max_tokens=300, temperature=0, extra_body=thinking
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person)
    assert bool(getattr(choice.message, "reasoning_content", None)) == (thinking is ON)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [OFF, ON], ids=["plain", "thinking"])
def test_marks_in_an_answer_of_a_format_are_its_text(server: Server, thinking: Any, stream: bool) -> None:
    value = {"a": ["</think>", "<｜DSML｜ calls>"]}
    formats: list[dict[str, Any]] = [
        {"extra_body": {**thinking, "guided_choice": [json.dumps(value, ensure_ascii=False)]}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": {"const": value}}}},
    ]
    for asked in formats:
        fields: Any = {"model": "nano", "messages": USER, "max_tokens": 300, "temperature": 0, "extra_body": thinking}
        answer = server.client.chat.completions.create(**fields | asked, stream=stream)
        if stream:
            content = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
        else:
            content = answer.choices[0].message.content
        assert json.loads(content) == value


def test_streams_give_the_same(server: Server) -> None:
    asked: Any = {"model": "nano", "messages": USER, "max_tokens": 300, "temperature": 0, "extra_body": OFF}
    asked["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "p", "schema": Person.model_json_schema()},
    }
    whole = server.client.chat.completions.create(**asked).choices[0].message.content
    parts = server.client.chat.completions.create(**asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in parts if chunk.choices)
    assert text == whole and Person.model_validate_json(text)


def test_json_object(server: Server) -> None:
    messages: Any = [{"role": "user", "content": "Some json please."}]
    for seed in range(3):
        answer = server.client.chat.completions.create(
            model="nano", messages=messages, response_format={"type": "json_object"}, max_tokens=200, seed=seed,
            extra_body=OFF,
        )  # fmt: skip
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize("thinking", [OFF, ON], ids=["plain", "thinking"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_required_calls(server: Server, thinking: Any, choice: Any, stream: bool) -> None:
    asked: Any = {"model": "nano", "messages": USER, "tools": [function(False)], "tool_choice": choice}
    asked |= {"max_tokens": 400, "seed": 1, "extra_body": thinking, "parallel_tool_calls": False}
    if stream:
        arguments, reason = "", None
        for chunk in server.client.chat.completions.create(**asked, stream=True):
            for call in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
                assert call.index == 0
                arguments += (call.function.arguments if call.function else "") or ""
            reason = chunk.choices[0].finish_reason if chunk.choices else reason
        assert reason == "tool_calls"
        check_arguments(arguments)
        return
    answer = server.client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls and len(answer.message.tool_calls) == 1
    check_arguments(answer.message.tool_calls[0].function.arguments)  # type: ignore[union-attr]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_strict_tools(server: Server, temperature: float) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Lisbon? Use the tool."}]
    answer = server.client.chat.completions.create(
        model="nano", messages=messages, tools=[function()], max_tokens=120, n=3, temperature=temperature, seed=5,
        extra_body=OFF,
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.finish_reason in ("stop", "tool_calls", "length")
        if choice.finish_reason == "tool_calls":
            for call in choice.message.tool_calls or ():
                check_arguments(call.function.arguments)  # type: ignore[union-attr]


def test_responses(server: Server) -> None:
    client = server.client
    parsed = client.responses.parse(
        model="nano", input="No JSON!", text_format=Person, max_output_tokens=300, temperature=0
    )
    assert isinstance(parsed.output_parsed, Person)
    tool: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    made = client.responses.create(
        model="nano", input="hi", tools=[tool], tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=300, temperature=0,
    )  # fmt: skip
    (call,) = [item for item in made.output if item.type == "function_call"]
    check_arguments(call.arguments)
    assert made.parallel_tool_calls is False


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"])
@pytest.mark.parametrize("thinking", [False, True])
def test_messages_tools(server: Server, choice: Any, thinking: bool) -> None:
    extra: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if thinking else {}
    answer = server.messages_client.messages.create(
        model="nano", max_tokens=400, messages=USER, tool_choice=choice | {"disable_parallel_tool_use": True},
        tools=[{"name": "get_weather", "input_schema": PARAMETERS}], extra_body=GREEDY, **extra,
    )  # fmt: skip
    (block,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use"
    jsonschema.validate(block.input, PARAMETERS)


def test_messages_format_and_strict_tools(server: Server) -> None:
    client = server.messages_client
    answer = client.messages.parse(model="nano", max_tokens=300, messages=USER, output_format=Person, extra_body=GREEDY)
    assert isinstance(answer.parsed_output, Person)
    tool: Any = {"name": "get_weather", "input_schema": PARAMETERS, "strict": True}
    answer = client.messages.create(model="nano", max_tokens=100, messages=USER, tools=[tool])
    for block in answer.content:
        if block.type == "tool_use" and answer.stop_reason == "tool_use":
            jsonschema.validate(block.input, PARAMETERS)


TAG = {"type": "structural_tag", "format": {"type": "sequence", "elements": [
    {"type": "const_string", "value": "<a>"}, {"type": "regex", "pattern": "[0-9]{2}"}]}}  # fmt: skip
FIELDS: list[tuple[str, Any, str]] = [
    ("guided_json", {"type": "integer", "minimum": 3, "maximum": 5}, "[345]"),
    ("guided_json", '{"enum": ["a"]}', '"a"'),
    ("guided_regex", "[a-c]{3}", "[abc]{3}"),
    ("guided_choice", ["one", "two"], "one|two"),
    ("guided_grammar", 'root ::= "x" [0-9] "y"', "x[0-9]y"),
    ("structured_outputs", {"choice": ["p", "q"]}, "p|q"),
    ("structured_outputs", {"json": {"const": 7}, "disable_any_whitespace": True}, "7"),
    ("json_schema", '{"const": null}', "null"),
    ("regex", "[xyz]", "[xyz]"),
    ("ebnf", 'root ::= "b" "c"?', "bc?"),
    ("structural_tag", json.dumps(TAG), "<a>[0-9]{2}"),
    ("response_format", {"type": "regex", "regex": "[st]{2}"}, "[st]{2}"),
    ("response_format", TAG, "<a>[0-9]{2}"),
    ("so_args", {"schema_type": "choice", "schema": ["u"]}, "u"),
]


@pytest.mark.parametrize(("name", "value", "pattern"), FIELDS, ids=lambda value: str(value)[:30])
def test_fields_of_other_servers(server: Server, name: str, value: Any, pattern: str) -> None:
    sampling = {"model": "nano", "max_tokens": 30, "seed": 4, name: value}
    chat = server.http.post("/v1/chat/completions", json=sampling | {"messages": USER} | OFF).json()
    assert re.fullmatch(pattern, chat["choices"][0]["message"]["content"])
    text = server.http.post("/v1/completions", json=sampling | {"prompt": "Once", "n": 2}).json()
    for choice in text["choices"]:
        assert re.fullmatch(pattern, choice["text"]) and choice["finish_reason"] == "stop"
    thought = server.http.post(
        "/v1/chat/completions", json=sampling | {"messages": USER, "max_tokens": 400, "temperature": 0} | ON
    ).json()["choices"][0]["message"]
    assert re.fullmatch(pattern, thought["content"]) and thought["reasoning_content"]


def test_native_route(server: Server) -> None:
    body = {"text": "Once", "sampling_params": {"regex": "[0-9]{4}", "max_new_tokens": 20}}
    assert re.fullmatch("[0-9]{4}", server.http.post("/generate", json=body).json()["text"])


def other(parameters: Any) -> Any:
    return {"type": "function", "function": {"name": "other", "parameters": parameters}}


IMPOSSIBLE = {"type": "object", "properties": {
    "b": {"type": "string"}, "a": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 2},
                                   "minItems": 1}}, "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
LOOP = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": UNIQUE}}}, "response_format",
     "'uniqueItems' at #/uniqueItems"),
    ({"tools": [function(True, {"type": "object", "properties": {"a": UNIQUE}, "required": ["a"]})]},
     "tools[0].function.parameters", "'uniqueItems' at #/properties/a/uniqueItems"),
    ({"tools": [function(), function(False)], "tool_choice": "required"},
     "tools", "unique"),
    ({"tools": [function(False, {"type": "object", "minProperties": 1})], "tool_choice": "required"},
     "tools[0].function.parameters", "'minProperties' at #/minProperties"),
    ({"tools": [function(False, {"type": "object", "properties": {"a": False}, "required": ["a"]})],
      "tool_choice": "required"}, "tools[0].function.parameters", "'a' is required, and no value satisfies it"),
    ({"tools": [function(), other(IMPOSSIBLE)], "tool_choice": "required"}, "tools[1].function.parameters",
     "parameters: #/properties/a/items: Unsatisfiable schema: minLength (3) is greater than maxLength (2)"),
    ({"tools": [function(), other(LOOP)], "tool_choice": "required"}, "tools[1].function.parameters",
     "no finite value satisfies #:"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": IMPOSSIBLE}}},
     "response_format", "response_format: #/properties/a/items: Unsatisfiable schema"),
    ({"guided_json": IMPOSSIBLE}, "guided_json", "guided_json: #/properties/a/items: Unsatisfiable schema"),
    ({"guided_json": IMPOSSIBLE, "tools": [function()]} | ON, "guided_json", "#/properties/a/items: Unsatisfiable"),
    ({"guided_json": False}, "guided_json", "no value satisfies it"),
    ({"guided_grammar": 'root ::= "a" root'}, "guided_grammar", "no finite text satisfies rule 'root'"),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_choice": []}, "guided_choice", "non-empty"),
    ({"guided_grammar": "root ::= nope"}, "guided_grammar", "nope"),
    ({"structural_tag": "{}"}, "structural_tag", "structural_tag"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "not"),
    ({"guided_regex": "a", "regex": "b"}, "regex", "cannot both"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "cannot both"),
    ({"guided_grammar": 'root ::= "a"', "tools": [function()]}, "guided_grammar", "cannot be combined with tools"),
    ({"guided_regex": "a", "ignore_eos": True}, "guided_regex", "ignore_eos"),
    ({"so_args": {"schema_type": "regex", "schema": "a", "trigger_token_ids": [9999]}}, "so_args", "vocabulary"),
    ({"guided_regex": "a" * 300_000}, "guided_regex", "at most"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param", "message"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_kept_is_a_400_that_names_it(
    server: Server, change: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    body = {"model": "nano", "messages": USER, "max_tokens": 4, "stream": stream} | OFF | change
    answer = server.http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and message in error["message"] and "so_args.schema" not in error["message"]


def test_length_is_reported(server: Server) -> None:
    answer = server.client.completions.create(
        model="nano", prompt="x", max_tokens=3, extra_body={"guided_json": Person.model_json_schema()}
    )
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.LengthFinishReasonError):
        server.client.chat.completions.parse(
            model="nano", messages=USER, response_format=Person, max_tokens=3, extra_body=OFF
        )


def test_a_grammar_that_becomes_too_complex_ends_the_answer_where_it_is(server: Server) -> None:
    """In the words of each protocol for an answer that was cut, with what was written; never an error of the server."""
    late = {"type": "sequence", "elements": [{"type": "regex", "pattern": "[0-9]{80}"}, REPEATED]}
    extra: Any = OFF | {"structural_tag": {"type": "structural_tag", "format": late}}
    answer = server.client.chat.completions.create(model="nano", messages=USER, max_tokens=200, extra_body=extra)
    choice: Any = answer.choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("length", "grammar_limit")
    assert re.fullmatch("[0-9]{80}a?", choice.message.content)
    chunks = list(
        server.client.chat.completions.create(
            model="nano", messages=USER, max_tokens=200, extra_body=extra, stream=True, **GREEDY
        )
    )
    assert re.fullmatch("[0-9]{80}a?", "".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    assert chunks[-1].choices[0].finish_reason == "length"
    response = server.client.responses.create(model="nano", input="x", max_output_tokens=200, extra_body=extra)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert re.fullmatch("[0-9]{80}a?", response.output_text)
    message: Any = server.messages_client.messages.create(model="nano", messages=USER, max_tokens=200, extra_body=extra)
    assert message.stop_reason == "max_tokens" and re.fullmatch("[0-9]{80}a?", message.content[0].text)


def test_nothing_left_is_an_error_of_the_request_alone(server: Server) -> None:
    body = {"model": "nano", "prompt": "x", "max_tokens": 9, "guided_regex": "ab", "allowed_token_ids": [5]}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 400 and "no token is left" in answer.json()["error"]["message"]
    assert server.http.post("/v1/completions", json=body | {"allowed_token_ids": None}).status_code == 200


def test_a_client_that_leaves_while_its_grammar_is_compiled(server: Server) -> None:
    slow = {"type": "string", "allOf": [{"pattern": f".*a.{{{n}}}"} for n in range(10, 24)]}
    body = {"model": "nano", "prompt": "x", "max_tokens": 9, "guided_json": slow}
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=body, timeout=0.05)
    server.wait_for("deepinfer:num_requests_running", 0)
    assert server.http.get("/health_generate").status_code == 200


def test_slow_schemas_of_clients_who_left_stop_nobody(server: Server) -> None:
    """Ten of them took 25 s of everybody's time."""

    def ask(schema: Any, seconds: float) -> httpx.Response:
        body = {"model": "nano", "prompt": "x", "max_tokens": 1, "guided_json": schema}
        return server.http.post("/v1/completions", json=body, timeout=seconds)

    def leave(number: int) -> None:
        schema = [{"type": "string", "maxLength": number}, {"type": "integer", "multipleOf": 2000003}]
        with pytest.raises(httpx.ReadTimeout):
            ask({"anyOf": schema}, 0.7)

    assert ask({"const": "first"}, 60).status_code == 200
    with ThreadPoolExecutor(10) as clients:
        list(clients.map(leave, range(3, 13)))
    server.wait_for("sglang:num_grammar_queue_reqs", 0, seconds=5)
    start = time.monotonic()
    assert ask({"const": "new"}, 60).status_code == 200
    assert time.monotonic() - start < 2.0
