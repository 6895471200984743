"""What cannot be enforced of structured output is a 400 that names its field, in each protocol; nothing is dropped."""

import json
from typing import Any

import pytest

from deepinfer.errors import BusyError
from deepinfer.server.errors import BUSY_SECONDS
from deepinfer.server.structure import structure_error
from deepinfer.structured.compiler import BUSY
from tests.server.process import MODEL, Server
from tests.server.test_bad_bodies import BODIES, check_error, post

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FORMAT_FIELDS = {CHAT: "response_format", MESSAGES: "output_config.format"}
ANY = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def refused(server: Server, path: str, change: dict[str, Any], param: str, *words: str) -> None:
    error = check_error(path, server.http.post(path, json={"model": MODEL, **BODIES[path]} | change), 400)
    assert error.get("param", param) == param
    assert all(word in error["message"] for word in (*words, *([param] if path == MESSAGES else ())))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "change",
    [
        {"guided_json": '{"\\ud800": {}}'},
        {"guided_json": '{"type": "\\ud800"}'},
        {"guided_json": '{"enum": ["\\ud800"]}'},
        {"guided_json": '{"properties": {"\\udfff": {"type": 5}}}'},
        {"json_schema": '{"\\ud800": {}}'},
        {"structured_outputs": {"json": '{"\\ud800": {}}'}},
        {"structural_tag": '{"type": "structural_tag", "format": {"type": "\\ud800"}}'},
        {"so_args": {"schema_type": "choice", "schema": '["\\ud800"]'}},
    ],
    ids=str,
)
def test_a_lone_surrogate_inside_a_text_ends_its_request_alone(
    server: Server, path: str, change: dict[str, Any]
) -> None:
    check_error(path, server.http.post(path, json={"model": MODEL, **BODIES[path]} | change), 400)
    assert server.http.get("/health").status_code == 200
    assert server.http.post(path, json={"model": MODEL, **BODIES[path]}).status_code == 200


@pytest.mark.parametrize("asked", [{"guided_regex": "a"}, {"structured_outputs": {"regex": "a"}}], ids=str)
@pytest.mark.parametrize(
    ("path", "own", "field"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": ANY}}},
         "response_format"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": ANY}}}, "text.format"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": ANY}}}, "output_config.format"),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": ANY}}, "output_format"),
    ],
    ids=str,
)  # fmt: skip
def test_two_structures_of_one_answer(
    server: Server, path: str, own: dict[str, Any], field: str, asked: dict[str, Any]
) -> None:
    refused(server, path, own | asked, "guided_regex" if "guided_regex" in asked else "structured_outputs.regex", field)


def test_a_text_format_is_no_structure(server: Server) -> None:
    body = {"model": MODEL, **BODIES[RESPONSES], "text": {"format": {"type": "text"}}, "guided_regex": "a"}
    assert server.http.post(RESPONSES, json=body).status_code == 200


def test_two_formats_of_a_message(server: Server) -> None:
    wanted = {"type": "json_schema", "schema": ANY}
    both = {"output_config": {"format": wanted}, "output_format": wanted}
    refused(server, MESSAGES, both, "output_format", "output_config.format")


@pytest.mark.parametrize("syntax", ["regex", "lark"])
def test_grammars_of_custom_tools(server: Server, syntax: str) -> None:
    other = {"type": "function", "name": "f", "parameters": ANY}
    tool = {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": syntax, "definition": "a"}}
    refused(server, RESPONSES, {"tools": [other, tool]}, "tools[1].format", "grammar")
    body = {"model": MODEL, **BODIES[RESPONSES]}
    taken = server.http.post(RESPONSES, json=body | {"tools": [tool | {"format": {"type": "text"}}]})
    assert taken.status_code == 200
    known = server.http.post(RESPONSES, json=body | {"tools": [tool | {"name": "apply_patch"}]})
    assert known.json()["error"]["param"] == "input", "the model has words of its own for it, too many for this one"


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (CHAT, "required"),
        (CHAT, {"type": "function", "function": {"name": "f"}}),
        (RESPONSES, "required"),
        (RESPONSES, {"type": "function", "name": "f"}),
        (RESPONSES, {"type": "custom", "name": "f"}),
        (MESSAGES, {"type": "any"}),
        (MESSAGES, {"type": "tool", "name": "f"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tools", [{}, {"tools": []}], ids=str)
def test_a_required_call_without_tools(server: Server, path: str, choice: Any, tools: dict[str, Any]) -> None:
    refused(server, path, {"tool_choice": choice} | tools, "tool_choice", "no tools")


@pytest.mark.parametrize(
    ("path", "choice"),
    [(CHAT, "auto"), (CHAT, "none"), (RESPONSES, "auto"), (RESPONSES, "none"), (MESSAGES, {"type": "auto"}),
     (MESSAGES, {"type": "none"})],
)  # fmt: skip
def test_other_choices_need_no_tools(server: Server, path: str, choice: Any) -> None:
    answer = server.http.post(path, json={"model": MODEL, **BODIES[path], "tool_choice": choice})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["guided_whitespace_pattern", "guided_decoding_backend"])
def test_fields_of_an_earlier_vllm(server: Server, path: str, name: str) -> None:
    refused(server, path, {name: "x"}, name, name)
    assert server.http.post(path, json={"model": MODEL, **BODIES[path], name: None}).status_code == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["guided_json", "json_schema"])
@pytest.mark.parametrize("value", [5, 1.5, [], [{}]], ids=str)
def test_what_is_no_schema(server: Server, path: str, name: str, value: Any) -> None:
    refused(server, path, {name: value}, name, f"{name}: must be a JSON Schema: an object, or its JSON text")


DEEP = '{"items":' * 70 + "{}" + "}" * 70
VERY_DEEP = '{"items":' * 900 + "{}" + "}" * 900
LONG = '{"minimum":' + "9" * 4000 + "}"
HUGE = '{"type":"number","minimum":1e999}'


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_text", [False, True], ids=["object", "text"])
@pytest.mark.parametrize("schema", [DEEP, VERY_DEEP, LONG, HUGE], ids=["deep", "very deep", "long", "huge"])
def test_schemas_beyond_reason(server: Server, path: str, schema: str, is_text: bool) -> None:
    body = json.dumps({"model": MODEL, **BODIES[path], "guided_json": "HERE"})
    answer = post(server, path, body.replace('"HERE"', json.dumps(schema) if is_text else schema).encode())
    error = check_error(path, answer, 400)
    assert error.get("param", "guided_json") == "guided_json" and "guided_json" in error["message"]


@pytest.mark.parametrize("value", ["[" * 130 + "]" * 130, '[{"a":1e999}]'], ids=["deep", "huge"])
def test_the_field_that_recipe_cannot_read_is_named(server: Server, value: str) -> None:
    body = json.dumps({"model": MODEL, **BODIES[CHAT], "tools": "HERE"})
    error = check_error(CHAT, post(server, CHAT, body.replace('"HERE"', value).encode()), 400)
    assert error["param"] == "tools"


BAD = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
EMPTY = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}, "required": ["a"]}


@pytest.mark.parametrize("schema", [BAD, EMPTY, {"enum": [1]}, {"type": "string"}], ids=str)
def test_a_strict_schema_is_named_by_its_path(server: Server, schema: Any) -> None:
    for path, tools, param in (
        (CHAT, [{"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}
                for name, parameters in (("f", ANY), ("g", schema))], "tools[1].function.parameters"),
        (RESPONSES, [{"type": "function", "name": name, "strict": True, "parameters": parameters}
                     for name, parameters in (("f", ANY), ("g", schema))], "tools[1].parameters"),
    ):  # fmt: skip
        refused(server, path, {"tools": tools}, param)
    wanted = {"name": "n", "strict": True, "schema": schema}
    chat = {"response_format": {"type": "json_schema", "json_schema": wanted}}
    refused(server, CHAT, chat, "response_format.json_schema.schema")
    refused(server, RESPONSES, {"text": {"format": {"type": "json_schema", **wanted}}}, "text.format.schema")


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_format_is_of_the_whole_answer(server: Server, path: str) -> None:
    """A value behind a beginning of it is none; vLLM's fields are of what is generated."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": '{"a": '}]
    kind = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANY}}
    formats: dict[str, Any] = {CHAT: {"response_format": kind, "continue_final_message": True}}
    formats[CHAT] |= {"add_generation_prompt": False}
    formats[MESSAGES] = {"output_config": {"format": {"type": "json_schema", "schema": ANY}}}
    refused(server, path, {"messages": messages} | formats[path], FORMAT_FIELDS[path], "begun")
    free = {"continue_final_message": True, "add_generation_prompt": False} if path == CHAT else {}
    change = {"messages": messages, "guided_regex": "[0-9]{3}"} | free
    assert server.http.post(path, json={"model": MODEL, **BODIES[path]} | change).status_code == 200


def test_a_compiler_with_too_much_to_do_is_not_the_requests_fault() -> None:
    error = structure_error(BusyError(BUSY), "guided_json")
    assert (error.status, error.param, error.retry_after) == (429, "guided_json", BUSY_SECONDS)
    assert error.message == "guided_json: too many grammars wait to be compiled, ask again later"
