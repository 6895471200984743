"""Conversation -> Prompt, for V4 and V4.1 (recipe spec, 2)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from deepinfer.recipe import json_text, templates
from deepinfer.recipe.conversation import MODEL_VERSIONS, Content, Conversation, ImageSource, Message, ModelVersion
from deepinfer.recipe.dsml import DSML_STYLES, open_block, write_tool_calls
from deepinfer.recipe.prompt import Prompt, PromptWriter


def render(
    conversation: Conversation, model_version: ModelVersion = "v4.1", add_generation_prompt: bool = True
) -> Prompt:
    """Write the prompt of a conversation.

    With ``add_generation_prompt`` the prompt ends where the model goes on (open assistant turn); without, it ends after
    the last message, an assistant turn closed by EOS (training text).  Raises ValueError for an unknown model version.
    """
    if model_version not in MODEL_VERSIONS:
        raise ValueError(f"model_version must be one of {', '.join(MODEL_VERSIONS)}, got {model_version!r}")
    writer = PromptWriter()
    writer.control("bos")
    header, messages = _split_header(conversation.messages, model_version)
    _write_header(writer, conversation, header, model_version, empty=header is None and not messages)
    before: Message | None = None
    if model_version == "v4":
        messages = [_with_sorted_calls(message) for message in messages]
    for message in _order_tool_results(messages):
        if model_version == "v4.1" and _repeats_reminder(message, before):
            continue
        _write_message(writer, conversation, message, before, model_version)
        before = message
    continues = bool(messages) and messages[-1].role == "assistant" and messages[-1].prefix
    if add_generation_prompt and not continues:
        writer.control("assistant")
        writer.control("think_start" if conversation.thinking else "think_end")
        if conversation.opens_tool_block:
            writer.template(open_block(DSML_STYLES[model_version]))
    return writer.finish()


def _split_header(messages: Sequence[Message], version: ModelVersion) -> tuple[Content | None, list[Message]]:
    """System text of the first block (None: none), and the messages that stay in place."""
    if version == "v4":  # no system token: every system message moves to the front
        parts: list[str | ImageSource] = []
        for message in messages:
            if message.role == "system" and message.content:
                parts.extend((message.content,) if isinstance(message.content, str) else message.content)
        return tuple(parts), _merge_users([m for m in messages if m.role != "system"])
    if messages and messages[0].role == "system":
        return messages[0].content, list(messages[1:])
    return None, list(messages)


def _merge_users(messages: Sequence[Message]) -> list[Message]:
    """Adjacent user messages as one, without the empty ones."""
    merged: list[Message] = []
    for message in messages:
        if message.role != "user" or not merged or merged[-1].role != "user":
            merged.append(message)
        elif message.content:
            before = merged.pop()
            parts = [m.content for m in (before, message) if m.content]
            content = parts[0] if len(parts) == 1 else _join(parts)
            merged.append(replace(message, content=content))
    return merged


def _join(contents: Sequence[Content]) -> Content:
    return tuple(part for content in contents for part in ((content,) if isinstance(content, str) else content))


def _write_header(
    writer: PromptWriter, conversation: Conversation, system: Content | None, version: ModelVersion, empty: bool
) -> None:
    """The first block.  V4.1 writes none for a conversation that says nothing at all, not even the effort."""
    sections = conversation.tools_in_force or conversation.json_object or conversation.json_schema is not None
    effort = ""
    if conversation.thinking and (version == "v4" or sections or not empty):
        effort = templates.EFFORT_HEADERS[version][conversation.reasoning_effort or "high"]
    if version == "v4.1" and (effort or system is not None or sections):
        writer.control("system")
    writer.text(effort)
    writer.content(system or "")
    if conversation.tools_in_force:
        _write_tools(writer, conversation, version)
    if conversation.json_schema is not None:
        spell_float = DSML_STYLES[version].spell_float
        writer.text(templates.FORMAT_OPENING + json_text.dumps(conversation.json_schema, spell_float=spell_float))
    elif conversation.json_object:
        writer.text(
            templates.V4_JSON_OBJECT if version == "v4" else templates.FORMAT_OPENING + '{"type": "json_object"}'
        )


def _write_tools(writer: PromptWriter, conversation: Conversation, version: ModelVersion) -> None:
    style = DSML_STYLES[version]
    writer.template(templates.TOOLS_OPENING.format(s=style.space, b=style.block))
    lines = (
        json_text.dumps(
            {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": {} if tool.parameters is None else tool.parameters,
            },
            spell_float=style.spell_float,
        )
        for tool in conversation.tools
        if not tool.defer_loading
    )
    writer.text("\n".join(lines))
    writer.text(templates.TOOLS_CLOSING)


def _write_message(
    writer: PromptWriter, conversation: Conversation, message: Message, before: Message | None, version: ModelVersion
) -> None:
    match message.role:
        case "system" | "latest_reminder":
            writer.control(message.role)
            writer.content(message.content)
        case "assistant":
            _write_assistant(writer, conversation, message, version)
        case "user" | "tool":
            if before is not None and before.role in ("user", "tool"):
                writer.text("\n\n")  # one turn
            else:
                writer.control("user")
            if message.role == "tool":
                writer.text("<tool_result>")
            writer.content(message.content)
            if message.role == "tool":
                writer.text("</tool_result>")


def _repeats_reminder(message: Message, before: Message | None) -> bool:
    """V4.1 shows only the first of adjacent reminders."""
    return message.role == "latest_reminder" and before is not None and before.role == "latest_reminder"


def _write_assistant(writer: PromptWriter, conversation: Conversation, message: Message, version: ModelVersion) -> None:
    writer.control("assistant")
    if conversation.thinking and (conversation.tools_in_force or message.prefix):
        writer.control("think_start")
        writer.assistant_text(message.reasoning_content or "")
        if message.prefix and not message.content:
            return  # the model goes on with the reasoning
    writer.control("think_end")
    if isinstance(message.content, str):  # converters refuse images here
        writer.assistant_text(message.content)
    if message.tool_calls:
        write_tool_calls(writer, message.tool_calls, DSML_STYLES[version])
    if not message.prefix:
        writer.control("eos")


def _with_sorted_calls(message: Message) -> Message:
    """V4 writes the calls of a turn in the order of their ids."""
    return replace(message, tool_calls=tuple(sorted(message.tool_calls, key=lambda call: call.id)))


def _order_tool_results(messages: Sequence[Message]) -> list[Message]:
    """Tool results in the order of the calls they answer, whatever order the client sent them in."""
    out: list[Message] = []
    order: dict[str | None, int] = {}
    position = 0
    while position < len(messages):
        message = messages[position]
        if message.role == "tool":
            run = list(takewhile(lambda m: m.role == "tool", messages[position:]))
            out.extend(sorted(run, key=lambda m: order.get(m.tool_call_id, len(order))))
            position += len(run)
            continue
        if message.role == "assistant":
            order = {call.id: i for i, call in enumerate(message.tool_calls)}
        out.append(message)
        position += 1
    return out
