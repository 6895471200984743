"""Render vectors: request to conversation, prompt, token IDs and options (recipe spec, 7)."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from deepinfer.recipe.chat_request import convert_chat_request
from deepinfer.recipe.compare import first_difference
from deepinfer.recipe.control_tokens import CONTROL_TOKENS
from deepinfer.recipe.conversation import Content, ImageSource, Message, ModelVersion
from deepinfer.recipe.encoding import encode_prompt
from deepinfer.recipe.errors import ConversionError, RequestError
from deepinfer.recipe.known_differences import RENDER_DIFFERENCES, Difference
from deepinfer.recipe.messages_request import convert_messages_request
from deepinfer.recipe.render import render
from deepinfer.recipe.request import ConversationRequest, ConversionOptions
from deepinfer.recipe.responses_request import convert_responses_request
from deepinfer.recipe.tokenizer import Tokenizer

Vector = dict[str, Any]
CONVERTERS = {
    "chat": convert_chat_request,
    "responses": convert_responses_request,
    "messages": convert_messages_request,
}
# The library has no such options.
_OUR_PARSING = ("include_stop_string", "answer_open_reasoning", "answer_has_format", "silent_roles")
_SAMPLING = ("max_tokens", "temperature", "top_p", "logprobs", "top_logprobs", "seed")


def check_render(vector: Vector, tokenizer: Tokenizer | None) -> str | None:
    """The first difference between a render vector and what we do, or None.  Without tokenizer no IDs are compared."""
    known = RENDER_DIFFERENCES.get(vector["name"], Difference(""))
    expected_error = vector.get("expected_error")
    try:
        request = convert(vector)
    except RequestError as error:
        return _error_difference(error, expected_error, known)
    if expected_error is not None:
        return None if known.supported else f"accepted, but should be refused: {expected_error}"
    return first_difference(_expected_render(vector, tokenizer), _actual_render(vector, request, tokenizer), known)


def convert(vector: Vector) -> ConversationRequest:
    """The request of a vector, converted with the vector's options."""
    body = vector["raw_body"] if "raw_body" in vector else vector["request"]
    options = vector.get("options") or {}
    converted = ConversionOptions(
        default_thinking=options.get("default_thinking_mode", True),
        reject_missing_reasoning=options.get("reasoning_content_behavior") == "Reject",
        responses_web_search=options.get("responses_web_search", "Drop"),
        messages_web_search=options.get("messages_web_search", "Reject"),
    ).with_aliases(options.get("model_aliases") or {})
    return CONVERTERS[vector["protocol"]](body, converted)


def _error_difference(error: RequestError, expected: Mapping[str, Any] | None, known: Difference) -> str | None:
    if expected is None:
        return f"refused: {error}"
    if expected["class"] != ("ConversionError" if isinstance(error, ConversionError) else "ValueError"):
        return f"error class {type(error).__name__}, expected {expected['class']}: {error}"
    if error.status_code != expected["status_code"]:
        return f"status {error.status_code}, expected {expected['status_code']}"
    message = expected.get("message") or expected["body"]["error"]["message"]
    if message.startswith("invalid JSON request: "):  # the parser's own words are not compared
        return None if error.message.startswith("invalid JSON request: ") else f"message {error.message!r}"
    if _gist(error.message) == _gist(message) or "message" in known.fields:
        return None
    return f"message {error.message!r}, expected {message!r}"


def _gist(message: str) -> str:
    """Of an unknown variant, not what else would be known: we accept more than the library."""
    return message.split(", expected")[0] if "unknown variant" in message else message


def _expected_render(vector: Vector, tokenizer: Tokenizer | None) -> dict[str, Any]:
    out = {
        key: vector[key]
        for key in (
            "expected_prompt", "expected_special_ranges", "expected_conversation", "expected_parsing_options",
            "expected_inference_options", "expected_stream",
        )
    }  # fmt: skip
    out["expected_namespace_tool_map"] = vector.get("expected_namespace_tool_map", {})
    out["other_prompt"] = vector["other_encoding"]["expected_prompt"]
    if tokenizer is not None:
        out["expected_token_ids"] = vector["expected_token_ids"]
        out["other_token_ids"] = vector["other_encoding"]["expected_token_ids"]
    return out


def _actual_render(vector: Vector, request: ConversationRequest, tokenizer: Tokenizer | None) -> dict[str, Any]:
    other: ModelVersion = "v4" if request.model_version == "v4.1" else "v4.1"
    prompt = render(request.conversation, request.model_version)
    other_prompt = render(request.conversation, other)
    out: dict[str, Any] = {
        "expected_prompt": prompt.text,
        "expected_special_ranges": [list(span) for span in prompt.control_ranges],
        "expected_conversation": conversation_record(request),
        "expected_parsing_options": _parsing_record(request),
        "expected_inference_options": _inference_record(request),
        "expected_stream": request.stream,
        "expected_namespace_tool_map": {name: list(pair) for name, pair in request.namespaces.items()},
        "other_prompt": other_prompt.text,
    }
    if tokenizer is not None:
        out["expected_token_ids"] = encode_prompt(prompt, tokenizer)
        out["other_token_ids"] = encode_prompt(other_prompt, tokenizer)
    return out


def _parsing_record(request: ConversationRequest) -> dict[str, Any]:
    record = _plain(asdict(request.parsing))
    return {key: value for key, value in record.items() if key not in _OUR_PARSING}


def _inference_record(request: ConversationRequest) -> dict[str, Any]:
    record = {key: getattr(request.inference, key) for key in _SAMPLING}
    constraint = request.inference.output_constraint
    return {**record, "output_constraint": None if constraint is None else asdict(constraint)}


def conversation_record(request: ConversationRequest) -> dict[str, Any]:
    """The conversation in the vectors' form."""
    conversation = request.conversation
    response_format = "text"
    for name, present in (
        ("json_object", conversation.json_object),
        ("json_schema", conversation.json_schema is not None),
        ("regex", conversation.regex is not None),
    ):
        response_format = name if present else response_format
    return {
        "messages": [_message_record(message, conversation.thinking) for message in conversation.messages],
        "thinking_mode": conversation.thinking,
        "tools": [_declared(asdict(tool)) for tool in conversation.tools],
        "tool_choice": conversation.tool_choice,
        "reasoning_effort": conversation.reasoning_effort,
        "response_format": response_format,
        "response_schema": conversation.json_schema,
        "response_regex": conversation.regex,
    }


def _declared(tool: dict[str, Any]) -> dict[str, Any]:
    """Without what only we have."""
    del tool["enforced"], tool["path"]
    return tool


def _message_record(message: Message, thinking: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"role": message.role, "content": _flat_text(message.content)}
    if message.role == "assistant":
        record["reasoning_content"] = (message.reasoning_content or "") if thinking else None
        record["prefix"] = message.prefix
        record["tool_calls"] = [asdict(call) for call in message.tool_calls] or None
    if message.role == "tool":
        record["tool_call_id"] = message.tool_call_id
    images = [part for part in message.content if isinstance(part, ImageSource)]
    if images:
        record["image_sources"] = [
            {
                "kind": image.kind,
                "detail": image.detail,
                "path": image.path,
                "data_url": image.url if image.kind == "data_url" else None,
                "url": image.url if image.kind == "url" else None,
            }
            for image in images
        ]
    return record


def _flat_text(content: Content) -> str:
    parts = (content,) if isinstance(content, str) else content
    return "\n\n".join(part if isinstance(part, str) else CONTROL_TOKENS["image"] for part in parts)


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
