"""Messages request -> ConversationRequest (recipe spec, 4)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from deepinfer.recipe import fields, settings
from deepinfer.recipe.conversation import Conversation, Message, ToolDefinition
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import Json
from deepinfer.recipe.messages_blocks import build_messages, read_entry
from deepinfer.recipe.request import ConversationRequest, ConversionOptions, InferenceOptions
from deepinfer.recipe.schema import check_format_schema
from deepinfer.recipe.tools import check_name, choose_tools

_CHOICES = ("auto", "any", "tool", "none")


def convert_messages_request(
    body: str | bytes | Mapping[str, Any], options: ConversionOptions | None = None
) -> ConversationRequest:
    """Convert a Messages request body.

    An assistant message at the end is continued when not thinking.  Raises RequestError for a malformed body and
    ConversionError for a refused one; both are ValueErrors with ``param``.
    """
    options = options or ConversionOptions()
    raw = fields.parse_body(cast(Any, body), "MessagesRequest")
    model = fields.required(raw, "model", fields.text, "")
    entries = [read_entry(entry, i) for i, entry in enumerate(fields.required(raw, "messages", fields.sequence, ""))]
    system = _read_system(raw)
    thinking_type = _read_thinking(raw)
    output = fields.optional(raw, "output_config", fields.struct("struct MessagesOutputConfig"), "") or {}
    effort = fields.optional(output, "effort", fields.one_of(settings.EFFORTS), "output_config")
    declared = fields.optional(raw, "tools", fields.sequence, "") or []
    tools = [_read_tool(entry, f"tools[{i}]") for i, entry in enumerate(declared)]
    choice, named = _read_tool_choice(raw.get("tool_choice"))
    schema = _read_format(raw, output)
    inference = _read_inference(raw, options)
    listed = fields.optional(raw, "stop_sequences", fields.sequence, "") or []
    stops = tuple(fields.text(entry, f"stop_sequences[{i}]") for i, entry in enumerate(listed))
    metadata = fields.optional(raw, "metadata", fields.struct("struct MessagesMetadata"), "") or {}
    fields.optional(metadata, "user_id", fields.text, "metadata")
    stream = bool(fields.optional(raw, "stream", fields.boolean, ""))

    version = settings.model_version(model, options)
    if not entries:
        raise ConversionError("messages: at least one message is required", "messages")
    settings.stop_strings(stops, "stop")
    thinking, level = settings.thinking_and_effort(thinking_type, effort, options)
    definitions = _check_tools(tools, options)
    reject_server_tools = options.messages_web_search == "Reject"
    messages = build_messages(entries, version, thinking, reject_server_tools)
    if messages and messages[-1].role == "assistant" and not thinking:
        messages[-1] = replace(messages[-1], prefix=True)
    if system is not None:
        messages.insert(0, Message("system", system))
    must_open = thinking and not options.enforces_calls
    if choice == "any":
        choice = "auto" if must_open else "required"
    chosen, tool_choice = choose_tools(definitions, choice, named, must_open)
    conversation = Conversation(
        messages=tuple(messages),
        thinking=thinking,
        tools=chosen,
        tool_choice=tool_choice,
        reasoning_effort=level,
        json_schema=schema,
    )
    if options.reject_missing_reasoning:
        settings.require_reasoning(conversation, bool(definitions))
    return ConversationRequest(
        model=model,
        model_version=version,
        conversation=conversation,
        inference=settings.resolve_inference(inference, conversation, version, options, schema),
        parsing=settings.parsing_options(conversation, stops),
        stream=stream,
        format_schema=schema,
    )


def _read_system(raw: Json) -> str | None:
    value = raw.get("system")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        fields.refuse("expected a string or a list", "system")
    texts = []
    for i, block in enumerate(value):
        path = f"system[{i}]"
        _, obj = fields.tagged(block, path, "MessagesSystemBlock", ("text",))
        texts.append(fields.required(obj, "text", fields.text, path))
    return "\n\n".join(texts)


def _read_thinking(raw: Json) -> str | None:
    """Type of the thinking setting; its token budget has no counterpart here and is only checked."""
    thinking = fields.optional(raw, "thinking", fields.struct("struct MessagesThinking"), "")
    if thinking is None:
        return None
    fields.optional(thinking, "budget_tokens", fields.unsigned(64), "thinking")
    return fields.required(thinking, "type", fields.one_of(("adaptive", "enabled", "disabled")), "thinking")


def _read_tool(value: Any, path: str) -> tuple[str, Json]:
    """(type, declaration); "custom" is the type of tools that the client runs."""
    obj = fields.struct("struct MessagesTool")(value, path)
    kind = fields.required(obj, "type", fields.text, path) if "type" in obj else "custom"
    fields.required(obj, "name", fields.text, path)
    fields.optional(obj, "description", fields.text, path)
    fields.optional(obj, "defer_loading", fields.boolean, path)
    fields.optional(obj, "strict", fields.boolean, path)
    return kind, obj


def _check_tools(declared: list[tuple[str, Json]], options: ConversionOptions) -> list[ToolDefinition]:
    tools = []
    for i, (kind, obj) in enumerate(declared):
        path = f"tools[{i}]"
        if kind.startswith("web_search_") and options.messages_web_search == "Drop":
            continue
        if kind != "custom":
            raise ConversionError(f"{path}: server tools are not supported", path)
        check_name(obj["name"], f"{path}.name")
        if obj.get("input_schema") is None:
            raise ConversionError(
                f'Invalid schema for function \'{obj["name"]}\': null is not of types "boolean", "object"', path
            )
        deferred = bool(obj.get("defer_loading"))
        enforced = obj["input_schema"] if obj.get("strict") else None
        schema, place = obj["input_schema"], f"{path}.input_schema"
        tools.append(ToolDefinition(obj["name"], obj.get("description"), schema, None, deferred, enforced, place))
    if tools and all(tool.defer_loading for tool in tools):
        raise ConversionError(
            "tools: at least one tool must have defer_loading=false. All tools cannot be deferred.", "tools"
        )
    return tools


def _read_tool_choice(value: Any) -> tuple[str, str | None]:
    if value is None:
        return "auto", None
    kind, obj = fields.tagged(value, "tool_choice", "MessagesToolChoice", _CHOICES)
    if kind == "tool":
        return "required", fields.required(obj, "name", fields.text, "tool_choice")
    return kind, None


def _read_format(raw: Json, output: Json) -> Any:
    """The JSON Schema that the answer must match, or None."""
    for obj, key, path in ((output, "format", "output_config"), (raw, "output_format", "")):
        value = obj.get(key)
        if value is not None:
            where = fields.join(path, key)
            _, chosen = fields.tagged(value, where, "MessagesOutputFormat", ("json_schema",))
            schema = fields.required(chosen, "schema", lambda schema, _: schema, where)
            return check_format_schema(schema, False, f"{where}.schema")
    return None


def _read_inference(raw: Json, options: ConversionOptions) -> InferenceOptions:
    limit = fields.optional(raw, "max_tokens", fields.unsigned(32), "")
    return InferenceOptions(
        max_tokens=None if limit is None else min(limit, options.max_tokens_bound),
        temperature=fields.optional(raw, "temperature", fields.number, ""),
        top_p=fields.optional(raw, "top_p", fields.number, ""),
        top_k=fields.optional(raw, "top_k", fields.signed, ""),
    )
