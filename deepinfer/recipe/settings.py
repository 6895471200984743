"""Settings that all three protocols share: model, thinking, sampling bounds, stop strings, format, parsing options."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deepinfer.recipe import json_text
from deepinfer.recipe.conversation import Conversation, Effort, Message, ModelVersion, ToolDefinition
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.request import (
    ConversionOptions,
    InferenceOptions,
    InitialStage,
    OutputConstraint,
    ParsingOptions,
)

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
_EFFORT_OF: dict[str, Effort] = {
    "minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "xhigh", "ultra": "max", "max": "max",
}  # fmt: skip
_MAX_STOPS = 16


def model_version(model: str, options: ConversionOptions) -> ModelVersion:
    """The version that a model name stands for.  Raises ConversionError for another name."""
    version = options.model_versions.get(model)
    if version is None:
        names = ", ".join(options.model_versions)
        raise ConversionError(f"The supported API model names are {names}, but you passed {model}.", "model", 400)
    return version


def thinking_and_effort(
    thinking_type: str | None, effort: str | None, options: ConversionOptions
) -> tuple[bool, Effort | None]:
    """The thinking type decides; without one effort ``none`` switches thinking off and any other one switches it on."""
    if thinking_type is None:
        thinking = options.default_thinking if effort is None else effort != "none"
    else:
        thinking = thinking_type != "disabled"
    return thinking, _EFFORT_OF.get(effort or "high", "high") if thinking else None


def temperature(value: float | None, thinking: bool) -> float:
    """Checked, then 1 when thinking.  Rounded to float32, the precision that samplers work in."""
    if value is not None and not 0 <= value <= 2:
        raise ConversionError("Invalid temperature value, the valid range of temperature is [0, 2]", "temperature")
    return 1.0 if thinking or value is None else _float32(value)


def top_p(value: float | None, thinking: bool, version: ModelVersion, tools_in_force: bool) -> float:
    """Checked, then what the model was tuned for: V4.1 thinking at least 0.95, not thinking 1; V4 thinking 0.95 with
    tools and 1 without, not thinking as asked."""
    if value is not None and not 0 < value <= 1:
        raise ConversionError("Invalid top_p value, the valid range of top_p is (0, 1.0]", "top_p")
    asked = 1.0 if value is None else value
    if version == "v4.1":
        return _float32(max(asked, 0.95)) if thinking else 1.0
    if thinking:
        return _float32(0.95) if tools_in_force else 1.0
    return _float32(asked)


def max_tokens(value: int | None, options: ConversionOptions, name: str = "max_tokens") -> int | None:
    """The value, within [1, the bound].  Raises ConversionError naming the field."""
    if value is not None and not 1 <= value <= options.max_tokens_bound:
        raise ConversionError(
            f"Invalid {name} value, the valid range of {name} is [1, {options.max_tokens_bound}]", name
        )
    return value


def stop_strings(stops: tuple[str, ...], name: str, listed: bool = True) -> tuple[str, ...]:
    """The strings, none of them empty and not too many.  Raises ConversionError naming the field."""
    if len(stops) > _MAX_STOPS:
        raise ConversionError(f"Stop string array too long: {len(stops)}", name)
    for i, stop in enumerate(stops):
        if not stop:
            where = f"{name}[{i}]" if listed else name
            raise ConversionError(
                f"Invalid '{where}': empty string. Expected a string with minimum length 1, but got an empty string "
                "instead.",
                where,
            )
    return stops


def seed(value: int | None) -> int | None:
    """The value, below 2^63.  Raises ConversionError."""
    if value is not None and value >= 2**63:
        raise ConversionError("Invalid seed value, the valid range of seed is [0, 2^63)", "seed")
    return value


def top_logprobs(logprobs: bool, count: int | None) -> int | None:
    """The value, at most 20, and only beside `logprobs`.  Raises ConversionError."""
    if count is None:
        return None
    if not logprobs:
        raise ConversionError(
            "Invalid top_logprobs and logprobs value, logprobs must be set to true if top_logprobs is used.",
            "top_logprobs",
        )
    if count > 20:
        raise ConversionError("Invalid top_logprobs value, the valid range of top_logprobs is [0, 20].", "top_logprobs")
    return count


def require_json_word(messages: Sequence[Message], param: str, where: str = "Prompt") -> None:
    """Asking for any JSON object without saying so in the prompt makes models write blanks for ever."""
    for message in messages:
        parts = (message.content,) if isinstance(message.content, str) else message.content
        if any(isinstance(part, str) and "json" in part.lower() for part in parts):
            return
    raise ConversionError(
        f"{where} must contain the word 'json' in some form to use '{param}' of type 'json_object'.", param
    )


def without_empty_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """An empty system message adds nothing, also where it would part two user turns."""
    return tuple(message for message in messages if not (message.role == "system" and not message.content))


def initial_stage(conversation: Conversation) -> InitialStage | None:
    """Where the output begins, by the message that it continues."""
    if not conversation.thinking:
        return None
    last = conversation.messages[-1] if conversation.messages else None
    if last is None or not last.prefix:
        return "ReasoningStart"
    if last.content:
        return "ContentContinuation"
    return "ReasoningContinuation" if last.reasoning_content else "ReasoningStart"


def parsing_options(conversation: Conversation, stops: tuple[str, ...]) -> ParsingOptions:
    """How to read the output of this conversation."""
    in_force = conversation.tools_in_force
    return ParsingOptions(
        parse_tool_calls=in_force,
        starts_in_tool_calls=conversation.opens_tool_block,
        parse_json_output=conversation.json_object,
        thinking_initial_stage=initial_stage(conversation),
        stop_sequences=stops,
    )


def output_constraint(conversation: Conversation, schema: Any = None) -> OutputConstraint | None:
    """Tools win over the format.  ``schema`` is the JSON Schema to enforce, which strict mode may have completed."""
    if conversation.tools_in_force:
        kind = "tool_call_required" if conversation.tool_choice == "required" else "tool_call"
        listed = [_tool_entry(tool) for tool in conversation.tools]
        return OutputConstraint(kind, json_text.compact(listed))  # type: ignore[arg-type]
    if conversation.json_schema is not None:
        return OutputConstraint("json", json_text.compact(schema))
    if conversation.json_object:
        return OutputConstraint("json", "")
    return None if conversation.regex is None else OutputConstraint("regex", conversation.regex)


def _tool_entry(tool: ToolDefinition) -> dict[str, Any]:
    function = {
        "name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict,
    }  # fmt: skip
    entry: dict[str, Any] = {"type": "function", "function": function}
    return {**entry, "defer_loading": True} if tool.defer_loading else entry


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def require_reasoning(conversation: Conversation, declares_tools: bool) -> None:
    """Refuse turns after the last user message whose reasoning the client did not pass back.

    That is turns that call tools and, with tools declared (be they in force or not), all turns.  A call id with
    ``_ET_`` was issued by us for a turn without reasoning, so nothing is missing there.
    """
    if not conversation.thinking:
        return
    for message in reversed(conversation.messages):
        if message.role == "user":
            return
        if message.role != "assistant" or message.reasoning_content is not None:
            continue
        if any("_ET_" in call.id for call in message.tool_calls):
            continue
        if message.tool_calls or declares_tools:
            raise ConversionError(
                "The `reasoning_content` in the thinking mode must be passed back to the API.", "messages"
            )


def resolve_inference(
    asked: InferenceOptions,
    conversation: Conversation,
    version: ModelVersion,
    options: ConversionOptions,
    schema: Any = None,
) -> InferenceOptions:
    """Sampling fields of the request, checked, after the model's own rules."""
    return replace(
        asked,
        max_tokens=max_tokens(asked.max_tokens, options),
        temperature=temperature(asked.temperature, conversation.thinking),
        top_p=top_p(asked.top_p, conversation.thinking, version, conversation.tools_in_force),
        top_logprobs=top_logprobs(asked.logprobs, asked.top_logprobs),
        seed=seed(asked.seed),
        output_constraint=output_constraint(conversation, schema),
    )
