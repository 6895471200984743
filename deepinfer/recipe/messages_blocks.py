"""Content blocks of a Messages request -> messages (recipe spec, 4)."""

from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any

from deepinfer.recipe import fields, json_text
from deepinfer.recipe.content import (
    UNSUPPORTED_IMAGE,
    BuildContent,
    check_base64,
    image_source,
    join_parts,
    refused_image,
)
from deepinfer.recipe.conversation import ImageSource, Message, ModelVersion, ToolCall
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import Json

_ROLES = ("user", "assistant", "system")
_BLOCKS = ("text", "image", "document", "thinking", "redacted_thinking", "server_tool_use", "tool_use", "tool_result",
           "web_search_tool_result")  # fmt: skip
_RESULT_BLOCKS = ("text", "image", "document")
_MEDIA_TYPES = ("image/jpeg", "image/jpg", "image/png", "image/gif", "image/webp")
_SERVER_BLOCKS = ("server_tool_use", "web_search_tool_result")


@dataclass
class Block:
    """One block, checked for shape.  ``text`` is thinking, ``part`` a text, image or document, ``parts`` a result."""

    kind: str
    text: str = ""
    part: BuildContent | None = None
    parts: list[BuildContent] = field(default_factory=list)
    call: ToolCall | None = None
    call_id: str = ""


@dataclass
class Entry:
    """One message of the request, checked for shape."""

    role: str
    blocks: list[Block]


def read_entry(value: Any, index: int) -> Entry:
    """One message of the list, its blocks checked.  Raises RequestError naming the path."""
    path = f"messages.{index}"
    obj = fields.struct("adjacently tagged enum MessagesMessage")(value, path)
    role = fields.required(obj, "role", fields.one_of(_ROLES), path)
    if "content" not in obj:
        fields.refuse("missing field `content`", f"{path}.content")
    content = obj["content"]
    if isinstance(content, str):
        return Entry(role, [Block("text", part=lambda _: content)])
    if not isinstance(content, list):
        fields.refuse("expected a string or a list", f"{path}.content")
    allowed = ("text",) if role == "system" else _BLOCKS
    return Entry(role, [_read_block(block, path, i, allowed) for i, block in enumerate(content)])


def _read_block(value: Any, path: str, index: int, allowed: tuple[str, ...]) -> Block:
    where = f"{path}.content[{index}]"
    kind, obj = fields.tagged(value, where, "MessagesContentBlock", allowed)
    match kind:
        case "text" | "image" | "document":
            return Block(kind, part=read_part(kind, obj, where, where))
        case "thinking":
            return Block(kind, text=fields.required(obj, "thinking", fields.text, where))
        case "tool_use":
            call_id = fields.required(obj, "id", fields.text, where)
            name = fields.required(obj, "name", fields.text, where)
            given = fields.required(obj, "input", lambda value, _: value, where)
            arguments = json_text.dumps(given, spell_float=json_text.rust_float)
            return Block(kind, call=ToolCall(call_id, name, arguments))
        case "tool_result":
            call_id = fields.required(obj, "tool_use_id", fields.text, where)
            return Block(kind, parts=_read_result(obj, where, f"{path}.content.{index}.tool_result"), call_id=call_id)
        case _:
            return Block(kind)


def _read_result(obj: Json, where: str, image_path: str) -> list[BuildContent]:
    content = obj.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [lambda _: content]
    if not isinstance(content, list):
        fields.refuse("expected a string or a list", f"{where}.content")
    parts = []
    for i, entry in enumerate(content):
        inner = f"{where}.content[{i}]"
        kind, part = fields.tagged(entry, inner, "MessagesToolResultBlock", _RESULT_BLOCKS)
        parts.append(read_part(kind, part, inner, image_path))
    return parts


def read_part(kind: str, obj: Json, where: str, image_path: str) -> BuildContent:
    """A text, image or document block."""
    if kind == "text":
        text = fields.required(obj, "text", fields.text, where)
        return lambda _: text
    source = fields.required(obj, "source", fields.struct("internally tagged enum MessagesSource"), where)
    inner = f"{where}.source"
    if kind == "document":
        text = _document_text(source, inner)
        return lambda _: text
    source_kind = fields.required(source, "type", fields.one_of(("base64", "url", "file")), inner)
    if source_kind == "base64":
        media = fields.required(source, "media_type", fields.one_of(_MEDIA_TYPES), inner)
        data = fields.required(source, "data", fields.text, inner)
        return _base64_image(media, data, image_path)
    if source_kind == "file":
        return refused_image(image_path, "file_id is not supported. Pass the image as a base64 data url instead.")
    url = fields.required(source, "url", fields.text, inner)
    return image_source(url, "high", image_path, f"invalid url: {json_text.dumps(url)}", data_urls=False)


def _base64_image(media: str, data: str, path: str) -> BuildContent:
    def build(version: ModelVersion) -> str | ImageSource:
        if version == "v4":
            return UNSUPPORTED_IMAGE
        check_base64(data, f"{path}: base64 decode error", path)
        return ImageSource(f"data:{media};base64,{data}", "high", path)

    return build


def _document_text(source: Json, path: str) -> str:
    """Plain text documents are read; of the others the model learns that there was one."""
    kind = fields.required(source, "type", fields.text, path)
    if kind == "text":
        return fields.required(source, "data", fields.text, path)
    if kind == "content":
        content = source.get("content")
        if isinstance(content, str):
            return content
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            return "\n\n".join(fields.required(part, "text", fields.text, path) for part in content)
    media = source.get("media_type")
    return f"[Unsupported document type: {media if isinstance(media, str) else 'unknown'}]"


def build_messages(
    entries: list[Entry], version: ModelVersion, thinking: bool, reject_server_tools: bool
) -> list[Message]:
    """Messages of the entries.  Raises ConversionError when tool uses and results do not belong together."""
    messages: list[Message] = []
    pending: list[str] = []
    for i, entry in enumerate(entries):
        if not entry.blocks:
            raise ConversionError(f"messages.{i}: all messages must have non-empty content", f"messages.{i}")
        if reject_server_tools and any(block.kind in _SERVER_BLOCKS for block in entry.blocks):
            raise ConversionError("Unsupported content block: server tools are not supported", f"messages.{i}")
        blocks = [block for block in entry.blocks if block.kind not in (*_SERVER_BLOCKS, "redacted_thinking")]
        match entry.role:
            case "system":
                _require_no_pending(pending, f"messages.{i}")
                messages.append(Message("system", join_parts([b.part(version) for b in blocks if b.part])))
            case "user":
                messages += _user_messages(blocks, i, pending, version)
            case _:
                message, pending = _assistant_message(blocks, i, pending, version, thinking)
                messages.append(message)
    _require_no_pending(pending, f"messages.{len(entries) - 1}", ":")
    return messages


def _require_no_pending(pending: list[str], where: str, after: str = ": ") -> None:
    if pending:
        raise ConversionError(
            f"{where}{after}`tool_use` ids were found without `tool_result` blocks immediately after: "
            f"{', '.join(pending)}. Each `tool_use` block must have a corresponding `tool_result` block in the next "
            "message.",
            where,
        )


def _user_messages(blocks: list[Block], index: int, pending: list[str], version: ModelVersion) -> list[Message]:
    """Results first, each answering a use of the message before; then everything else."""
    messages = []
    answered: list[str] = []
    for j, block in enumerate(blocks):
        where = f"messages.{index}.content.{j}"
        if block.kind == "thinking":
            message = f"messages.{index}.content: thinking blocks may only be in `assistant` messages"
            raise ConversionError(message, where)
        if block.kind == "tool_use":
            raise ConversionError(
                f"messages.{index}: `tool_use` blocks can only be in `assistant` messages", f"messages.{index}"
            )
        if block.kind == "tool_result":
            _answer(block.call_id, pending, answered, where)
            content = join_parts([part(version) for part in block.parts])
            messages.append(Message("tool", content, tool_call_id=block.call_id))
        elif block.part is not None:
            _require_no_pending(pending, f"messages.{index}")
            messages.append(Message("user", join_parts([block.part(version)])))
    _require_no_pending(pending, f"messages.{index - 1}", ":")
    return messages


def _answer(call_id: str, pending: list[str], answered: list[str], where: str) -> None:
    if call_id in answered:
        raise ConversionError(
            f"{where}: each tool_use must have a single result. Found multiple `tool_result` blocks with id: {call_id}",
            where,
        )
    if call_id not in pending:
        raise ConversionError(
            f"unexpected `{where}: tool_use_id` found in `tool_result` blocks: {call_id}. Each `tool_result` block "
            "must have a corresponding `tool_use` block in the previous message.",
            where,
        )
    pending.remove(call_id)
    answered.append(call_id)


def _assistant_message(
    blocks: list[Block], index: int, pending: list[str], version: ModelVersion, thinking: bool
) -> tuple[Message, list[str]]:
    """The message, and the ids of its tool uses, which the next message must answer."""
    where = f"messages.{index}"
    _require_no_pending(pending, where)
    reasoning: list[str] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    for j, block in enumerate(blocks):
        if block.kind == "tool_result":
            raise ConversionError(f"{where}: `tool_result` blocks can only be in `user` messages", where)
        if block.call is not None:
            if any(call.id == block.call.id for call in calls):
                raise ConversionError(f"{where}.content.{j}: `tool_use` ids must be unique", where)
            calls.append(block.call)
        elif block.kind == "thinking":
            reasoning.append(block.text)
        elif block.part is not None:
            _require_no_pending([call.id for call in calls], f"{where}.{j}")
            part = block.part(version)
            if not isinstance(part, str):
                raise ConversionError("Image in assistant message is unsupported", where)
            texts.append(part)
    thought = "\n\n".join(reasoning) if reasoning and thinking else None
    spoken = list(dropwhile(lambda text: not text, texts))  # nothing is parted from nothing
    message = Message("assistant", "\n\n".join(spoken), thought, tuple(calls))
    return message, [call.id for call in calls]
