"""Input items of a Responses request -> messages (recipe spec, 4).

Reasoning, assistant text and calls that follow each other make one assistant turn.
"""

from dataclasses import dataclass, field
from typing import Any

from deepinfer.recipe import fields, json_text
from deepinfer.recipe.content import UNSUPPORTED_DOCUMENT, BuildContent, image_source, join_parts, refused_image
from deepinfer.recipe.conversation import Message, ModelVersion, ToolCall
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import Json

_ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("input_text", "output_text", "input_image", "input_file", "refusal")
_OUTPUT_PARTS = ("input_text", "input_image", "input_file")
_DETAILS = ("low", "high", "original", "auto")
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


@dataclass
class Item:
    """One item, checked for shape: ``kind`` is message, reasoning, call, output, or other (which is dropped)."""

    kind: str
    path: str
    role: str = ""
    parts: list[BuildContent] = field(default_factory=list)
    reasoning: str = ""
    call: ToolCall | None = None
    call_id: str = ""


def read_item(value: Any, path: str) -> Item:
    """One item of `input`.  Raises RequestError naming the path."""
    if not isinstance(value, dict) or not ("type" in value or "role" in value):
        fields.refuse("invalid input item", path)
    kind = fields.optional(value, "type", fields.text, path) or "message"
    if kind == "message":
        role = fields.required(value, "role", fields.one_of(_ROLES), path)
        return Item("message", path, role=role, parts=_read_content(value, path))
    if kind == "reasoning":
        return Item("reasoning", path, reasoning=_read_reasoning(value, path))
    if kind in _CALLS:
        return Item("call", path, call=_read_call(kind, value, path))
    if kind in _OUTPUTS:
        call_id = fields.required(value, "call_id", fields.text, path)
        return Item("output", path, parts=_read_output(value, path), call_id=call_id)
    return Item("other", path)


def _read_content(value: Json, path: str) -> list[BuildContent]:
    if "content" not in value:
        fields.refuse("missing field `content`", fields.join(path, "content"))
    content = value["content"]
    if isinstance(content, str):
        return [lambda _: content]
    where = fields.join(path, "content")
    if not isinstance(content, list):
        fields.refuse("content should be a string or a list of content blocks", where)
    return [_read_part(part, f"{where}[{i}]", path, _PARTS) for i, part in enumerate(content)]


def _read_output(value: Json, path: str) -> list[BuildContent]:
    if "output" not in value:
        fields.refuse("missing field `output`", fields.join(path, "output"))
    output = value["output"]
    if isinstance(output, str):
        return [lambda _: output]
    where = fields.join(path, "output")
    if not isinstance(output, list):
        fields.refuse("output should be a string or a list of output content parts", where)
    return [_read_part(part, f"{where}[{i}]", path, _OUTPUT_PARTS) for i, part in enumerate(output)]


def _read_part(value: Any, path: str, item_path: str, allowed: tuple[str, ...]) -> BuildContent:
    kind, obj = fields.tagged(value, path, "ResponsesContentBlock", allowed)
    if kind in ("input_text", "output_text", "refusal"):
        text = fields.required(obj, "refusal" if kind == "refusal" else "text", fields.text, path)
        return lambda _: text
    if kind == "input_file":
        return lambda _: UNSUPPORTED_DOCUMENT
    url = fields.optional(obj, "image_url", fields.text, path)
    file_id = fields.optional(obj, "file_id", fields.text, path)
    detail = fields.optional(obj, "detail", fields.one_of(_DETAILS), path)
    if url:
        return image_source(url, detail or "high", item_path, "Unsupported image_url format")
    if file_id is not None:
        return refused_image(path, "file_id is not supported. Pass the image as a base64 data url instead.")
    return refused_image(path, "input_image must have image_url or file_id")


def _read_reasoning(value: Json, path: str) -> str:
    """The reasoning's own text; summaries and encrypted content are not it."""
    parts = fields.optional(value, "content", fields.sequence, path) or []
    texts = []
    for i, part in enumerate(parts):
        where = f"{path}.content[{i}]"
        obj = fields.struct("struct ResponsesReasoningText")(part, where)
        texts.append(fields.required(obj, "text", fields.text, where))
    return "\n".join(texts)


def _read_call(kind: str, value: Json, path: str) -> ToolCall:
    call_id = fields.required(value, "call_id", fields.text, path)
    name = fields.required(value, "name", fields.text, path)
    if kind == "custom_tool_call":
        arguments = json_text.compact({"input": fields.required(value, "input", fields.text, path)})
        return ToolCall(call_id, name, arguments)
    space = fields.optional(value, "namespace", fields.text, path)
    arguments = fields.required(value, "arguments", fields.text, path)
    return ToolCall(call_id, f"{space}::{name}" if space else name, arguments)


@dataclass
class _Turn:
    """An assistant turn being collected."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self, thinking: bool) -> Message:
        reasoning = "\n".join(self.reasoning) if self.reasoning else None
        text = "\n\n".join(text for text in self.texts if text)
        return Message("assistant", text, reasoning if thinking else None, tuple(self.calls))


def build_messages(items: list[Item], version: ModelVersion, thinking: bool) -> list[Message]:
    """Messages of the items.  Raises ConversionError when calls and outputs do not belong together."""
    messages: list[Message] = []
    turn: _Turn | None = None
    open_calls: list[str] = []
    answers: dict[str, Message] = {}
    seen: set[str] = set()

    def close_turn() -> None:
        nonlocal turn
        if turn is not None:
            messages.append(turn.message(thinking))
        turn = None

    def close_calls() -> None:
        """Every call must be answered; results go into the order of the calls."""
        nonlocal open_calls
        for call_id in open_calls:
            if call_id not in answers:
                raise ConversionError(f"No tool output found for tool call {call_id}.", "input")
        close_turn()
        messages.extend(answers[call_id] for call_id in open_calls)
        open_calls = []
        answers.clear()

    for item in items:
        if item.kind == "other":
            continue
        if item.kind == "output":
            _add_answer(item, open_calls, answers, seen, version)
            continue
        if item.kind == "call" and item.call is not None:
            if answers:
                close_calls()
            if item.call.id in seen:
                raise ConversionError(f"Duplicate 'call_id': {item.call.id}.", item.path)
            seen.add(item.call.id)
            open_calls.append(item.call.id)
            turn = turn or _Turn()
            turn.calls.append(item.call)
            continue
        if open_calls:
            close_calls()
        if item.kind == "reasoning":
            if not item.reasoning:
                continue
            if turn is not None and any(turn.texts):
                close_turn()
            turn = turn or _Turn()
            turn.reasoning.append(item.reasoning)
        elif item.role == "assistant":
            turn = turn or _Turn()
            turn.texts.append(_assistant_text(item, version))
        else:
            close_turn()
            content = join_parts([part(version) for part in item.parts])
            says_user = item.role == "user" or (item.role == "developer" and version == "v4")  # V4 knows no developer
            messages.append(Message("user" if says_user else "system", content))
    close_calls()
    return messages


def _add_answer(
    item: Item, open_calls: list[str], answers: dict[str, Message], seen: set[str], version: ModelVersion
) -> None:
    if item.call_id in answers or (item.call_id in seen and item.call_id not in open_calls):
        raise ConversionError(f"Duplicate tool output for call_id: {item.call_id}.", item.path)
    if item.call_id not in open_calls:
        raise ConversionError(f"No tool call found for tool output with call_id {item.call_id}.", item.path)
    content = join_parts([part(version) for part in item.parts])
    answers[item.call_id] = Message("tool", content, tool_call_id=item.call_id)


def _assistant_text(item: Item, version: ModelVersion) -> str:
    content = join_parts([part(version) for part in item.parts])
    if not isinstance(content, str):
        raise ConversionError(f"{item.path}: Image in assistant message is unsupported", item.path)
    return content
