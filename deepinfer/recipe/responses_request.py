"""Responses request -> ConversationRequest (recipe spec, 4)."""

from collections.abc import Mapping
from typing import Any, cast

from deepinfer.recipe import fields, settings
from deepinfer.recipe.conversation import Conversation, Message
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import Json
from deepinfer.recipe.request import ConversationRequest, ConversionOptions, InferenceOptions
from deepinfer.recipe.responses_items import Item, build_messages, read_item
from deepinfer.recipe.responses_tools import convert_tools, read_tool_choice, read_tools
from deepinfer.recipe.schema import check_format_schema, closed_schema
from deepinfer.recipe.tools import choose_tools

_FORMATS = ("text", "json_schema", "json_object")
_LOGPROBS = "message.output_text.logprobs"


def convert_responses_request(
    body: str | bytes | Mapping[str, Any], options: ConversionOptions | None = None
) -> ConversationRequest:
    """Convert a Responses request body.

    Raises RequestError for a malformed body and ConversionError for a refused one; both are ValueErrors with ``param``.
    """
    options = options or ConversionOptions()
    raw = fields.parse_body(cast(Any, body), "ResponsesRequest")
    model = fields.required(raw, "model", fields.text, "")
    items = _read_input(raw.get("input"))
    instructions = fields.optional(raw, "instructions", fields.text, "")
    reasoning = fields.optional(raw, "reasoning", fields.struct("struct ResponsesReasoning"), "") or {}
    effort = fields.optional(reasoning, "effort", fields.one_of(settings.EFFORTS), "reasoning")
    declared = read_tools(fields.optional(raw, "tools", fields.sequence, "") or [])
    choice, named, echoed_choice = read_tool_choice(raw.get("tool_choice"))
    text = fields.optional(raw, "text", fields.struct("struct ResponsesText"), "") or {}
    format_kind, format_obj = _read_format(text)
    inference = _read_inference(raw)
    stream = bool(fields.optional(raw, "stream", fields.boolean, ""))

    version = settings.model_version(model, options)
    if items is None and instructions is None:
        raise ConversionError("Either input or instructions must be provided", "input")
    if items == []:
        raise ConversionError("Input items array must not be empty", "input")
    thinking, level = settings.thinking_and_effort(None, effort, options)
    tools = convert_tools(declared, options)
    messages = build_messages(items or [], version, thinking)
    if instructions:
        messages.insert(0, Message("system", instructions))
    must_open = thinking and not options.enforces_calls
    chosen, tool_choice = choose_tools(tools.definitions, choice, named, must_open)
    if format_kind == "json_object":
        settings.require_json_word(tuple(messages), "text.format", "Response input messages")
    schema = None
    if format_kind == "json_schema":
        schema = check_format_schema(format_obj["schema"], bool(format_obj.get("strict")), "text.format.schema")
    conversation = Conversation(
        messages=tuple(messages),
        thinking=thinking,
        tools=chosen,
        tool_choice=tool_choice,
        reasoning_effort=level,
        json_object=format_kind == "json_object",
        json_schema=format_obj["schema"] if format_kind == "json_schema" else None,
    )
    if options.reject_missing_reasoning:
        settings.require_reasoning(conversation, bool(tools.definitions))
    return ConversationRequest(
        model=model,
        model_version=version,
        conversation=conversation,
        inference=settings.resolve_inference(inference, conversation, version, options, schema),
        parsing=settings.parsing_options(conversation, ()),
        stream=stream,
        namespaces=tools.namespaces,
        custom_tools=frozenset(tools.custom),
        format_schema=closed_schema(format_obj["schema"]) if format_obj.get("strict") else schema,
        echo={
            "instructions": instructions,
            "max_output_tokens": inference.max_tokens,
            "reasoning": {"effort": effort, "summary": reasoning.get("summary")},
            "temperature": 1.0 if inference.temperature is None else inference.temperature,
            "text": {"format": _echo_format(format_kind, format_obj), "verbosity": text.get("verbosity")},
            "tool_choice": echoed_choice,
            "tools": tools.echo,
            "top_logprobs": inference.top_logprobs or 0,
            "top_p": 1.0 if inference.top_p is None else inference.top_p,
            "user": fields.optional(raw, "user", fields.text, ""),
        },
    )


def _read_input(value: Any) -> list[Item] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return [Item("message", "input", role="user", parts=[lambda _: value])]
    if not isinstance(value, list):
        fields.refuse("input should be a string or a list of input items", "input")
    return [read_item(entry, f"input[{i}]") for i, entry in enumerate(value)]


def _read_format(text: Json) -> tuple[str, Json]:
    if "format" not in text:
        return "text", {}
    kind, obj = fields.tagged(text["format"], "text.format", "ResponsesTextFormat", _FORMATS)
    if kind == "json_schema":
        fields.required(obj, "name", fields.text, "text.format")
        fields.optional(obj, "description", fields.text, "text.format")
        fields.optional(obj, "strict", fields.boolean, "text.format")
        fields.required(obj, "schema", lambda schema, _: schema, "text.format")
    return kind, obj


def _echo_format(kind: str, obj: Json) -> Json:
    if kind != "json_schema":
        return {"type": kind}
    kept = {key: obj.get(key) for key in ("name", "schema", "description", "strict")}
    return {"type": kind, **kept}


def _read_inference(raw: Json) -> InferenceOptions:
    top_logprobs = fields.optional(raw, "top_logprobs", fields.unsigned(8), "")
    include = raw.get("include")
    return InferenceOptions(
        max_tokens=fields.optional(raw, "max_output_tokens", fields.unsigned(32), ""),
        temperature=fields.optional(raw, "temperature", fields.number, ""),
        top_p=fields.optional(raw, "top_p", fields.number, ""),
        logprobs=top_logprobs is not None or (isinstance(include, list) and _LOGPROBS in include),
        top_logprobs=top_logprobs,
    )
