"""Structured output: what a request asks for under any of its names, as `so_args` whose grammar is ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastapi import Request

from deepinfer.errors import BusyError
from deepinfer.params import SamplingParams
from deepinfer.recipe import ConversationRequest
from deepinfer.recipe.structure import (
    Format,
    answer_format,
    enforced_schema,
    json_part,
    output_format,
    text,
)
from deepinfer.server.body import while_connected
from deepinfer.server.errors import ApiError, from_value_error
from deepinfer.server.state import server_state
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.json_schema import check_schema, read_schema
from deepinfer.structured.lark import read_choices
from deepinfer.structured.structural_tag import read_structural_tag

if TYPE_CHECKING:
    from deepinfer.server.protocol import SamplingRequest
    from deepinfer.server.state import ServerState

# Field of a request -> the schema_type of so_args.
_FIELDS = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "ebnf",
    "json_schema": "json", "regex": "regex", "ebnf": "ebnf", "structural_tag": "structural_tag",
}  # fmt: skip
_STRUCTURED_OUTPUTS = {
    "json": "json", "regex": "regex", "choice": "choice", "grammar": "ebnf", "structural_tag": "structural_tag",
}  # fmt: skip
STRUCTURE_FIELDS = (*_FIELDS, "structured_outputs", "so_args")
# Members of structured_outputs that ask for nothing that is not so anyway.
_NEUTRAL = {"disable_any_whitespace": (True, False), "disable_fallback": (True, False), "json_object": (False,)}


@dataclass(frozen=True)
class Structure:
    """A constraint, and the field of the request that asks for it; `schemas`: those in it, by their fields."""

    constraint: Constraint
    field: str
    schemas: tuple[tuple[str, Any], ...] = ()


def asked_structure(
    body: SamplingRequest, raw: Mapping[str, Any], format_field: str = "response_format"
) -> Structure | None:
    """What vLLM's and SGLang's fields ask for.  `format_field` is that of the protocol's own response format.

    ApiError 400 if they ask for two things, or for something malformed.
    """
    found = []
    for name, kind in _FIELDS.items():
        value = getattr(body, name)
        if value is not None:
            found.append(_structure(kind, value, name))
    if body.so_args is not None:
        found.append(_from_so_args(body.so_args, "so_args"))
    if body.structured_outputs is not None:
        found.append(_read_structured_outputs(body.structured_outputs))
    response_format: Any = raw
    for name in format_field.split("."):
        response_format = response_format.get(name) if isinstance(response_format, Mapping) else None
    if isinstance(response_format, dict) and response_format.get("type") == "structural_tag":
        found.append(_structure("structural_tag", response_format, format_field))
    elif response_format is not None and response_format != {"type": "text"} and found:
        message = f"{found[0].field} and {format_field} cannot both say what the answer must be"
        raise ApiError(message, param=found[0].field)
    if len(found) > 1:
        message = f"{found[0].field} and {found[1].field} cannot both say what the answer must be"
        raise ApiError(message, param=found[1].field)
    return found[0] if found else None


def completion_structure(body: SamplingRequest, raw: Mapping[str, Any]) -> Structure | None:
    """As `asked_structure`, with the response formats of Chat Completions."""
    asked = asked_structure(body, raw)
    value = raw.get("response_format")
    if asked is not None or value is None:
        return asked
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure(Constraint("json_object"), "response_format")
    if kind == "regex":
        return _structure("regex", value.get("regex"), "response_format")
    if kind == "json_schema" and isinstance(value.get("json_schema"), dict):
        return _structure("json", value["json_schema"].get("schema"), "response_format")
    message = "response_format.type must be one of text, json_object, json_schema, regex, structural_tag"
    raise ApiError(message, param="response_format")


def _read_structured_outputs(given: Mapping[str, Any]) -> Structure:
    asked = {name: value for name, value in given.items() if value is not None and value not in _NEUTRAL.get(name, ())}
    for name in asked:
        if name not in (*_STRUCTURED_OUTPUTS, "json_object"):
            message = f"structured_outputs.{name[:200]} is not supported"
            raise ApiError(message, param=f"structured_outputs.{name[:200]}", code="unsupported_parameter")
    if len(asked) != 1:
        known = ", ".join((*_STRUCTURED_OUTPUTS, "json_object"))
        raise ApiError(f"structured_outputs must hold exactly one of {known}", param="structured_outputs")
    name, value = next(iter(asked.items()))
    if name != "json_object":
        return _structure(_STRUCTURED_OUTPUTS[name], value, f"structured_outputs.{name}")
    if value is not True:
        raise ApiError("structured_outputs.json_object must be true", param="structured_outputs.json_object")
    return Structure(Constraint("json_object"), "structured_outputs.json_object")


def _structure(kind: str, schema: Any, field: str) -> Structure:
    return _from_so_args({"schema_type": kind, "schema": schema}, field)


def _from_so_args(so_args: Any, field: str) -> Structure:
    try:
        return Structure(Constraint.from_so_args(so_args), field)
    except RecursionError:
        raise ApiError(f"{field} is nested too deeply", param=field) from None
    except ValueError as error:
        raise structure_error(error, field) from None


def structure_error(error: ValueError, field: str) -> ApiError:
    """A fault of so_args, in the words of the field that it comes from."""
    message = str(error)
    if isinstance(error, BusyError):
        return from_value_error(BusyError(message.replace("so_args", field, 1)), field)
    if field != "so_args":
        message = message.replace("so_args.schema", field, 1)
    return ApiError(message if field in message else f"{field}: {message}", param=field)


def holds_answer(asked: Structure | None) -> bool:
    """Whether the structure is that of the answer from its beginning on, and has no place for tool calls."""
    if asked is None or asked.constraint.trigger_token_ids:
        return False
    return asked.constraint.schema_type != "structural_tag"


def conversation_structure(
    state: ServerState,
    request: ConversationRequest,
    asked: Structure | None,
    field: str,
    parallel_calls: bool = True,
    ends_thinking: bool = False,
) -> Structure | None:
    """The structure of a whole chat output: reasoning, answer, tool calls.  `field` is that of the response format.

    With `ends_thinking` the engine ends the reasoning wherever its budget does, so the grammar begins behind it.
    ApiError 400 naming the field of what cannot be enforced.
    """
    control_ids = state.text.tokenizer.control_ids
    answer = answer_format(request)
    if asked is not None:
        field = asked.field
        if asked.constraint.schema_type == "ebnf" or asked.constraint.trigger_token_ids:
            return _whole_grammar(request, asked, control_ids["think_end"])
        answer = _as_format(asked)
    conversation = request.conversation
    if asked is None and answer is not None and conversation.messages[-1].prefix:
        message = f"{field} cannot be combined with an answer that is begun: it is of the whole answer"
        raise ApiError(message, param=field)
    in_force = conversation.tools if conversation.tools_in_force else ()
    is_required = conversation.tool_choice == "required"
    schemas = [(tool.path, schema) for tool in in_force if (schema := enforced_schema(tool, is_required)) is not None]
    for path, schema in schemas:
        try:
            check_schema(schema)
        except ValueError as error:
            raise structure_error(error, path) from None
    begins_behind = ends_thinking and request.parsing.begins_with_reasoning
    try:
        whole = output_format(_answering(request) if begins_behind else request, answer, control_ids, parallel_calls)
    except ValueError as error:
        raise from_value_error(error, "tools") from None
    if whole is None:
        return None
    if answer is None:
        field = "tools"
    if whole["type"] == "json_schema":
        found = _structure("json", whole["json_schema"], field)
    else:
        if answer is not None and answer["type"] == "json_schema":
            schemas.append((field, answer["json_schema"]))
        found = _structure("structural_tag", {"type": "structural_tag", "format": whole}, field)
        found = replace(found, schemas=tuple(schemas))
    return _behind(found, control_ids["think_end"]) if begins_behind else found


def _answering(request: ConversationRequest) -> ConversationRequest:
    """The request as if its reasoning were over."""
    return replace(request, parsing=replace(request.parsing, thinking_initial_stage=None))


def _behind(structure: Structure, token_id: int) -> Structure:
    """The structure of what comes after this token."""
    return replace(structure, constraint=replace(structure.constraint, trigger_token_ids=(token_id,)))


def _as_format(asked: Structure) -> Format:
    kind, schema = asked.constraint.schema_type, asked.constraint.schema
    try:
        if kind == "json":
            return json_part(read_schema(schema))
        if kind == "choice":
            return {"type": "or", "elements": [text(choice) for choice in read_choices(schema)]}
        if kind == "structural_tag":
            return read_structural_tag(schema)
    except ValueError as error:
        raise structure_error(error, asked.field) from None
    return json_part({"type": "object"}) if kind == "json_object" else {"type": "regex", "pattern": schema}


def _whole_grammar(request: ConversationRequest, asked: Structure, think_end: int) -> Structure:
    """A constraint that cannot be a part of another one."""
    if request.conversation.tools_in_force:
        raise ApiError(f"{asked.field} cannot be combined with tools", param=asked.field)
    if not request.parsing.begins_with_reasoning or asked.constraint.trigger_token_ids:
        return asked
    return _behind(asked, think_end)


async def with_structure(request: Request, params: SamplingParams, structure: Structure | None) -> SamplingParams:
    """The parameters with the constraint, whose grammar is ready.

    ApiError 400 if there is none for it, ClientDisconnect as soon as nobody waits for it.
    """
    if structure is None:
        return params
    return await while_connected(request, _with_grammar(server_state(request), params, structure))


async def _with_grammar(state: ServerState, params: SamplingParams, structure: Structure) -> SamplingParams:
    so_args = structure.constraint.so_args()
    try:
        params = replace(params, so_args=so_args)
        params.check_vocabulary(state.text.tokenizer.vocab_size)
        with state.metrics.grammar():
            await state.text.engine.compile(so_args)
    except BusyError as error:
        state.metrics.reject("grammar_queue")
        raise structure_error(error, structure.field) from None
    except ValueError as error:
        for path, schema in structure.schemas:  # one of them may be the reason
            await _check_alone(state, path, schema)
        raise structure_error(error, structure.field) from None
    return params


async def _check_alone(state: ServerState, path: str, schema: Any) -> None:
    """ApiError naming the field of a schema that has no grammar by itself."""
    try:
        await state.text.engine.compile(_structure("json", schema, path).constraint.so_args())
    except ValueError as error:
        raise structure_error(error, path) from None
