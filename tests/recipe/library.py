"""The public library (deepseek-recipe) as oracle: vectors of `deepinfer recipe check` for new requests."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import deepseek_recipe as library

from deepinfer.recipe.check import public_definition

Vector = dict[str, Any]
REQUESTS = {
    "chat": library.ChatCompletionRequest,
    "responses": library.ResponsesRequest,
    "messages": library.MessagesRequest,
}


@cache
def tokenizer() -> Any:
    return library.Tokenizer.from_str(json.dumps(public_definition()))


@cache
def encodings() -> dict[str, Any]:
    return {
        "v4": library.DeepseekV4Encoding().with_tokenizer(tokenizer()),
        "v4.1": library.DeepseekV41Encoding().with_tokenizer(tokenizer()),
    }


def conversion_options(options: dict[str, Any]) -> Any:
    made = library.ConversionOptions()
    if "default_thinking_mode" in options:
        made = made.with_default_thinking_mode(options["default_thinking_mode"])
    if options.get("reasoning_content_behavior") == "Reject":
        made = made.with_reasoning_content_behavior(library.ReasoningContentBehavior.Reject)
    return made


def render_vector(name: str, protocol: str, request: Any, options: dict[str, Any] | None = None) -> Vector:
    """What the library makes of a request."""
    vector: Vector = {"name": name, "category": "rules", "protocol": protocol, "request": request,
                      "options": options or {}}  # fmt: skip
    try:
        read = REQUESTS[protocol](json.dumps(request))
    except ValueError as error:
        wrong = {"stage": "parse", "class": "ValueError", "status_code": 400, "message": str(error)}
        return vector | {"expected_error": wrong}
    tool_map = read.namespace_tool_map(conversion_options(options or {})) if protocol == "responses" else {}
    try:
        converted = read.convert(conversion_options(options or {}))
    except library.ConversionError as error:
        wrong = {"stage": "convert", "class": "ConversionError", "status_code": error.status_code,
                 "body": json.loads(error.body)}  # fmt: skip
        return vector | {"expected_error": wrong}
    version = "v4" if converted.model_version == library.ModelVersion.DeepseekV4Pro else "v4.1"
    other = "v4" if version == "v4.1" else "v4.1"
    conversation = converted.conversation
    return vector | {
        "encoding": version,
        **_rendering(conversation, version),
        "other_encoding": {"encoding": other, **_rendering(conversation, other)},
        "expected_conversation": _conversation_record(conversation),
        "expected_parsing_options": _parsing_record(converted.parsing_options),
        "expected_inference_options": _inference_record(converted.inference_options),
        "expected_stream": converted.stream,
        "expected_namespace_tool_map": {name: list(pair) for name, pair in tool_map.items()},
    }


def _rendering(conversation: Any, version: str) -> dict[str, Any]:
    encoding = encodings()[version]
    rendered = encoding.render_conversation(conversation)
    return {
        "expected_prompt": rendered.prompt,
        "expected_special_ranges": [list(span) for span in rendered.special_ranges],
        "expected_token_ids": list(encoding.encode(conversation)),
    }


def _conversation_record(conversation: Any) -> dict[str, Any]:
    tools = ("name", "description", "parameters", "strict", "defer_loading")
    return {
        "messages": [_message_record(message) for message in conversation.messages],
        "tools": [{name: getattr(tool, name) for name in tools} for tool in conversation.tools],
        **{
            name: getattr(conversation, name)
            for name in ("thinking_mode", "tool_choice", "reasoning_effort", "response_format", "response_schema",
                         "response_regex")
        },
    }  # fmt: skip


def _message_record(message: Any) -> dict[str, Any]:
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "assistant":
        record |= {"reasoning_content": message.reasoning_content, "prefix": message.prefix, "tool_calls": None}
        if message.tool_calls:
            fields = ("id", "name", "arguments")
            record["tool_calls"] = [{name: getattr(call, name) for name in fields} for call in message.tool_calls]
    if message.role == "tool":
        record["tool_call_id"] = message.tool_call_id
    return record


def _parsing_record(parsing: Any) -> dict[str, Any]:
    stage = parsing.thinking_initial_stage
    names = ("parse_tool_calls", "starts_in_tool_calls", "parse_json_output")
    return {
        **{name: getattr(parsing, name) for name in names},
        "thinking_initial_stage": None if stage is None else str(stage).rsplit(".", 1)[-1],
        "stop_sequences": list(parsing.stop_sequences),
    }


def _inference_record(inference: Any) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "logprobs", "top_logprobs", "seed")
    constraint = inference.output_constraint
    made = None if constraint is None else {"kind": constraint.kind, "schema": constraint.schema}
    return {**{name: getattr(inference, name) for name in names}, "output_constraint": made}


def joined_output(request: Any, pieces: Sequence[str], finish: str) -> dict[str, Any]:
    """What a client of Chat Completions makes of an output that arrives in these pieces."""
    converted = library.ChatCompletionRequest(json.dumps(request)).convert(library.ConversionOptions())
    generator = library.ChatCompletionRequest.chunk_generator(converted, "ID", "MODEL")
    processor = library.StreamProcessor(generator, converted.parsing_options)
    reasons = {"stop": "Stop", "length": "Length"}
    chunks = [library.InferenceChunk.ready(), *(library.InferenceChunk.text(piece, 1) for piece in pieces)]
    chunks.append(library.InferenceChunk.finish(getattr(library.InferenceFinishReason, reasons[finish])))
    events: list[Any] = []
    for chunk in chunks:
        if not processor.finished:
            events += [json.loads(event.to_json()) for event in processor.push(chunk)]
    return join_chunks(events)


def join_chunks(events: Sequence[Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"reasoning": "", "text": "", "calls": [], "end": None}
    for choice in (event["choices"][0] for event in events):
        delta = choice["delta"]
        out["reasoning"] += delta.get("reasoning_content") or ""
        out["text"] += delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            if call.get("id"):
                out["calls"].append([call["function"]["name"], ""])
            out["calls"][call["index"]][1] += call["function"].get("arguments") or ""
        out["end"] = choice["finish_reason"] or out["end"]
    return out
