"""The messages of a Chat Completions request."""

from collections.abc import Callable, Sequence
from typing import Any

from deepinfer.recipe import fields
from deepinfer.recipe.content import BuildContent, image_source, join_parts, refused_image
from deepinfer.recipe.conversation import Content, Message, ModelVersion, ToolCall
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import Json

# Reading finds faults of shape; what depends on the model comes after, when the model is known.
BuildMessage = Callable[[ModelVersion, bool], Message]

_ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_PARTS = ("text", "image_url", "file")
_DETAILS = ("low", "high", "original", "auto")


def read_message(entry: Any, path: str) -> BuildMessage:
    """Check one message; the result builds it for a model version, with or without thinking."""
    role, obj = fields.tagged(entry, path, "ChatCompletionRequestMessage", _ROLES, tag="role")
    if role == "assistant":
        return _read_assistant(obj, path)
    if "content" not in obj:
        fields.refuse("missing field `content`", fields.join(path, "content"))
    if role == "latest_reminder":
        reminder = fields.text(obj["content"], fields.join(path, "content"))
        return lambda version, _: Message("latest_reminder", reminder)
    content = _read_content(obj["content"], path)
    if role == "tool":
        call_id = fields.required(obj, "tool_call_id", fields.text, path)
        return lambda version, _: Message("tool", content(version), tool_call_id=call_id)
    kind = "system" if role == "developer" else role
    return lambda version, _: Message(kind, content(version))  # type: ignore[arg-type]


def _read_assistant(obj: Json, path: str) -> BuildMessage:
    content = None if obj.get("content") is None else _read_content(obj["content"], path)
    reasoning = fields.optional(obj, "reasoning_content", fields.text, path)
    prefix = bool(fields.optional(obj, "prefix", fields.boolean, path))
    entries = fields.optional(obj, "tool_calls", fields.sequence, path)
    calls = None
    if entries is not None:
        calls = tuple(_read_call(entry, f"{path}.tool_calls[{i}]") for i, entry in enumerate(entries))

    def build(version: ModelVersion, thinking: bool) -> Message:
        if calls == ():
            where = f"{path}.tool_calls"
            raise ConversionError(
                f"Invalid '{where}': empty array. Expected an array with minimum length 1, but got an empty array "
                "instead.",
                where,
            )
        if content is None and not calls:
            raise ConversionError("Invalid assistant message: content or tool_calls must be set", path)
        text = "" if content is None else content(version)
        if not isinstance(text, str):
            raise ConversionError("Image in assistant message is not supported", path)
        return Message("assistant", text, reasoning if thinking else None, calls or (), prefix)

    return build


def _read_call(entry: Any, path: str) -> ToolCall:
    obj = fields.struct("struct ChatCompletionMessageToolCall")(entry, path)
    call_id = fields.required(obj, "id", fields.text, path)
    fields.required(obj, "type", fields.one_of(("function",)), path)
    function = fields.required(obj, "function", fields.struct("struct ChatCompletionFunctionCall"), path)
    inner = fields.join(path, "function")
    return ToolCall(
        call_id,
        fields.required(function, "name", fields.text, inner),
        fields.required(function, "arguments", fields.text, inner),
    )


def _read_content(value: Any, path: str) -> Callable[[ModelVersion], Content]:
    if isinstance(value, str):
        return lambda _: value
    where = fields.join(path, "content")
    if not isinstance(value, list):
        fields.refuse("content should be a string or a list", where)
    parts = [_read_part(part, f"{where}[{i}]", path) for i, part in enumerate(value)]
    return lambda version: join_parts([part(version) for part in parts])


def _read_part(value: Any, path: str, message_path: str) -> BuildContent:
    kind, obj = fields.tagged(value, path, "ChatCompletionRequestContentBlock", _PARTS)
    if kind == "text":
        text = fields.required(obj, "text", fields.text, path)
        return lambda _: text
    if kind == "file":
        return _read_file(obj, path, f".{message_path}")
    image = fields.required(obj, "image_url", fields.struct("struct ChatCompletionImageUrl"), path)
    inner = fields.join(path, "image_url")
    url = fields.required(image, "url", fields.text, inner)
    detail = fields.optional(image, "detail", fields.one_of(_DETAILS), inner)
    return image_source(url, detail or "high", f".{message_path}", "Unsupported image_url format")


def _read_file(part: Json, path: str, shown: str) -> BuildContent:
    """A file is an image in a data URL; its fields may stand in the part itself or under ``file``."""
    inner = part.get("file")
    obj = {**part, **inner} if isinstance(inner, dict) else part
    file_id = fields.optional(obj, "file_id", fields.text, path)
    data = fields.optional(obj, "file_data", fields.text, path)
    if file_id is not None:
        return refused_image(shown, "file_id is not supported. Pass the image as a base64 data url instead.")
    if data is None:
        return refused_image(shown, "file must have a file_id or file_data")
    if not data.lower().startswith("data:"):
        return refused_image(shown, "file_data is not a valid base64 data url")
    return image_source(data, "high", shown, "Unsupported image_url format")


def check_tool_turns(messages: Sequence[Message]) -> None:
    """Every call is answered by tool messages right after it, and every tool message answers a call."""
    open_ids: list[str] = []
    for i, message in enumerate(messages):
        if message.role == "tool":
            if not open_ids:
                raise ConversionError(
                    "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'",
                    f"messages[{i}]",
                )
            if message.tool_call_id not in open_ids:
                raise ConversionError(
                    "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
                    "'tool_call_id', The following tool_call_ids did not have response messages: "
                    f"{message.tool_call_id}",
                    f"messages[{i}].tool_call_id",
                )
            open_ids.remove(message.tool_call_id or "")
            continue
        _require_answered(open_ids, i)
        open_ids = [call.id for call in message.tool_calls]
        for position, call_id in enumerate(open_ids):
            if call_id in open_ids[:position]:
                raise ConversionError(
                    f"Duplicate value for 'tool_call_id' of {call_id} in message[{i}]", f"messages[{i}].tool_calls"
                )
    _require_answered(open_ids, len(messages))


def _require_answered(open_ids: list[str], index: int) -> None:
    if open_ids:
        raise ConversionError(
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
            "'tool_call_id'. (insufficient tool messages following tool_calls message)",
            f"messages[{index}]",
        )
