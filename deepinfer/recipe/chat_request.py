"""Chat Completions request -> ConversationRequest (recipe spec, 4)."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from deepinfer.recipe import fields, settings
from deepinfer.recipe.chat_messages import check_tool_turns, read_message
from deepinfer.recipe.conversation import Conversation, Message, ModelVersion, ToolDefinition
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import Json
from deepinfer.recipe.prompt import Prompt
from deepinfer.recipe.render import render
from deepinfer.recipe.request import ConversationRequest, ConversionOptions, InferenceOptions
from deepinfer.recipe.schema import check_format_schema, closed_schema
from deepinfer.recipe.tools import check_name, choose_tools

_FORMATS = ("json_object", "json_schema", "regex", "text")


def convert_chat_request(
    body: str | bytes | Mapping[str, Any], options: ConversionOptions | None = None
) -> ConversationRequest:
    """Convert a Chat Completions request body.

    Raises RequestError for a malformed body and ConversionError for a refused one; both are ValueErrors with ``param``.
    """
    options = options or ConversionOptions()
    raw = fields.parse_body(cast(Any, body), "ChatCompletionRequest")
    model = fields.required(raw, "model", fields.text, "")
    entries = fields.required(raw, "messages", fields.sequence, "")
    thinking_type = _thinking_type(raw)
    effort = fields.optional(raw, "reasoning_effort", fields.one_of(settings.EFFORTS), "")
    tools = [_read_tool(entry, f"tools[{i}]") for i, entry in enumerate(_sequence(raw, "tools"))]
    choice, named = _read_tool_choice(raw.get("tool_choice"))
    format_kind, format_value, strict = _read_format(raw)
    inference = _read_inference(raw)
    stops, stops_listed = _read_stops(raw.get("stop"), "stop")
    stream = bool(fields.optional(raw, "stream", fields.boolean, ""))
    include_usage = _read_include_usage(raw)
    read = [read_message(entry, f"messages[{i}]") for i, entry in enumerate(entries)]

    version = settings.model_version(model, options)
    if not entries:
        raise ConversionError("Empty input messages", "messages")
    if include_usage is not None and not stream:
        raise ConversionError("stream_options should be set along with stream = true", "stream_options")
    settings.stop_strings(stops, "stop", stops_listed)
    thinking, level = settings.thinking_and_effort(thinking_type, effort, options)
    for i, tool in enumerate(tools):
        check_name(tool.name, f"tools[{i}].function.name")
    messages = settings.without_empty_system([message(version, thinking) for message in read])
    check_tool_turns(messages)
    _check_prefix_is_last(messages)
    if format_kind == "json_object":
        settings.require_json_word(messages, "response_format")
    must_open = thinking and not options.enforces_calls
    chosen, choice = choose_tools(tools, choice, named, must_open)
    _check_prefix_use(messages, bool(tools), format_kind)
    schema = format_value
    if format_kind == "json_schema":
        schema = check_format_schema(format_value, strict, "response_format.json_schema.schema")
    conversation = Conversation(
        messages=messages,
        thinking=thinking,
        tools=chosen,
        tool_choice=choice,
        reasoning_effort=level,
        json_object=format_kind == "json_object",
        json_schema=format_value if format_kind == "json_schema" else None,
        regex=format_value if format_kind == "regex" else None,
    )
    if options.reject_missing_reasoning:
        settings.require_reasoning(conversation, bool(tools))
    return ConversationRequest(
        model=model,
        model_version=version,
        conversation=conversation,
        inference=settings.resolve_inference(inference, conversation, version, options, schema),
        parsing=settings.parsing_options(conversation, stops),
        stream=stream,
        include_usage=bool(include_usage),
        format_schema=closed_schema(format_value) if strict else schema,
    )


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = False,
    reasoning_effort: str | None = None,
    response_format: Mapping[str, Any] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    model_version: ModelVersion = "v4.1",
    add_generation_prompt: bool = True,
) -> Prompt:
    """Render Chat Completions messages.

    Arguments are spelled as in a request; ``reasoning_effort`` counts only with ``thinking``.  Without
    ``add_generation_prompt`` the prompt ends after the last message (an assistant turn closed by EOS).  Raises
    ValueError as ``convert_chat_request`` does.
    """
    body: Json = {"model": "any", "messages": list(messages), "tools": list(tools or ())}
    body["thinking"] = {"type": "enabled" if thinking else "disabled"}
    if thinking and reasoning_effort is not None:
        body["reasoning_effort"] = reasoning_effort
    if response_format is not None:
        body["response_format"] = response_format
    if tool_choice is not None:
        body["tool_choice"] = tool_choice
    request = convert_chat_request(body, ConversionOptions(model_versions={"any": model_version}))
    return render(request.conversation, model_version, add_generation_prompt)


def _sequence(raw: Json, key: str) -> list[Any]:
    return fields.optional(raw, key, fields.sequence, "") or []


def _thinking_type(raw: Json) -> str | None:
    thinking = fields.optional(raw, "thinking", fields.struct("struct ChatCompletionThinking"), "")
    if thinking is None:
        return None
    return fields.required(thinking, "type", fields.one_of(("adaptive", "enabled", "disabled")), "thinking")


def _read_tool(entry: Any, path: str) -> ToolDefinition:
    tool = fields.struct("struct ChatCompletionTool")(entry, path)
    fields.required(tool, "type", fields.one_of(("function",)), path)
    function = fields.required(tool, "function", fields.struct("struct ChatCompletionFunction"), path)
    inner = fields.join(path, "function")
    return ToolDefinition(
        name=fields.required(function, "name", fields.text, inner),
        description=fields.optional(function, "description", fields.text, inner),
        parameters=function.get("parameters"),
        strict=fields.optional(function, "strict", fields.boolean, inner),
        path=fields.join(inner, "parameters"),
    )


def _read_tool_choice(value: Any) -> tuple[str, str | None]:
    """(choice, name of the one function that must be called)."""
    if value is None:
        return "auto", None
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value, None
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        if not isinstance(function, dict):
            fields.refuse(
                f"field `function`: invalid type: {fields.describe(function)}, "
                "expected struct ChatCompletionToolChoiceFunction",
                "tool_choice.function",
            )
        return "required", fields.required(function, "name", fields.text, "tool_choice.function")
    fields.refuse("expected one of `none`, `auto`, `required` or a tool", "tool_choice")


def _read_format(raw: Json) -> tuple[str, Any, bool]:
    """(kind, schema or regular expression, strict)."""
    value = raw.get("response_format")
    if value is None:
        return "text", None, False
    path = "response_format"
    kind, obj = fields.tagged(value, path, "ChatCompletionResponseFormat", _FORMATS)
    if kind == "regex":
        return kind, fields.required(obj, "regex", fields.text, path), False
    if kind != "json_schema":
        return kind, None, False
    inner = fields.required(obj, "json_schema", fields.struct("struct ChatCompletionJsonSchema"), path)
    path = fields.join(path, "json_schema")
    strict = fields.optional(inner, "strict", fields.boolean, path)
    return kind, fields.required(inner, "schema", lambda schema, _: schema, path), bool(strict)


def _read_stops(value: Any, path: str) -> tuple[tuple[str, ...], bool]:
    """(stop strings, whether they came as a list)."""
    if value is None:
        return (), True
    if isinstance(value, str):
        return (value,), False
    if not isinstance(value, list):
        fields.refuse("expected a string or a list", path)
    return tuple(fields.text(entry, f"{path}[{i}]") for i, entry in enumerate(value)), True


def _read_include_usage(raw: Json) -> bool | None:
    """None when the request has no stream options."""
    stream_options = fields.optional(raw, "stream_options", fields.struct("struct ChatCompletionStreamOptions"), "")
    if stream_options is None:
        return None
    return bool(fields.optional(stream_options, "include_usage", fields.boolean, "stream_options"))


def _read_inference(raw: Json) -> InferenceOptions:
    """Sampling fields as asked; ``max_completion_tokens`` counts when ``max_tokens`` is absent."""
    limit = fields.optional(raw, "max_tokens", fields.unsigned(32), "")
    if limit is None:
        limit = fields.optional(raw, "max_completion_tokens", fields.unsigned(32), "")
    count = fields.optional(raw, "n", fields.unsigned(8), "")
    if count == 0:
        raise ConversionError("Invalid n value, the valid range of n is [1, 255]", "n")
    return InferenceOptions(
        max_tokens=limit,
        temperature=fields.optional(raw, "temperature", fields.number, ""),
        top_p=fields.optional(raw, "top_p", fields.number, ""),
        logprobs=bool(fields.optional(raw, "logprobs", fields.boolean, "")),
        top_logprobs=fields.optional(raw, "top_logprobs", fields.unsigned(8), ""),
        seed=fields.optional(raw, "seed", fields.unsigned(64), ""),
        n=count or 1,
        presence_penalty=fields.optional(raw, "presence_penalty", fields.number, ""),
        frequency_penalty=fields.optional(raw, "frequency_penalty", fields.number, ""),
        repetition_penalty=fields.optional(raw, "repetition_penalty", fields.number, ""),
        top_k=fields.optional(raw, "top_k", fields.signed, ""),
        min_p=fields.optional(raw, "min_p", fields.number, ""),
        min_tokens=fields.optional(raw, "min_tokens", fields.unsigned(32), ""),
        ignore_eos=bool(fields.optional(raw, "ignore_eos", fields.boolean, "")),
        stop_token_ids=tuple(
            fields.unsigned(32)(entry, f"stop_token_ids[{i}]")
            for i, entry in enumerate(_sequence(raw, "stop_token_ids"))
        ),
        logit_bias=_read_logit_bias(raw),
    )


def _read_logit_bias(raw: Json) -> dict[int, float] | None:
    bias = fields.optional(raw, "logit_bias", fields.struct("a map of token IDs to numbers"), "")
    if bias is None:
        return None
    if not all(key.isascii() and key.isdigit() for key in bias):
        fields.refuse("logit_bias keys must be token IDs", "logit_bias")
    return {int(key): fields.number(value, f"logit_bias.{key}") for key, value in bias.items()}


def _check_prefix_is_last(messages: Sequence[Message]) -> None:
    if any(message.prefix for message in messages[:-1]):
        raise ConversionError(
            "Invalid completion message: prefix set true with message which is not final message or message role is "
            "not assistant",
            "messages",
        )


def _check_prefix_use(messages: Sequence[Message], has_tools: bool, format_kind: str) -> None:
    """An open turn can only be plain text."""
    if not messages or not messages[-1].prefix:
        return
    if format_kind == "json_object":
        raise ConversionError("response_format json_object should not be used with prefix", "response_format")
    if has_tools or any(message.tool_calls for message in messages):
        raise ConversionError("Function call should not be used with prefix", "messages")
