"""Outputs that a random model would never give, as token IDs, through the stream builders of the routes."""

import json
from collections.abc import Sequence
from typing import Any

from deepinfer.recipe import (
    ChatStream,
    ConversationRequest,
    ConversionOptions,
    MessagesStream,
    Prompt,
    ResponsesStream,
    Tokenizer,
    convert_chat_request,
    convert_messages_request,
    convert_responses_request,
)
from deepinfer.server.chat import ChatChoice
from deepinfer.server.messages import MessageReader, new_call_id
from deepinfer.server.prompts import PreparedPrompt
from deepinfer.server.recipe_reader import RecipeReader
from deepinfer.server.text_engine import Delta

PROTOCOLS = ("chat", "responses", "messages")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def force(tokenizer: Tokenizer, text: str) -> list[int]:
    """IDs of an output in which control tokens are control tokens."""
    spelled = {tokenizer.bytes_of(token_id).decode(): token_id for token_id in tokenizer.control_ids.values()}
    token_ids: list[int] = []
    while text:
        control = next((spelling for spelling in spelled if text.startswith(spelling)), None)
        if control:
            token_ids.append(spelled[control])
            text = text[len(control) :]
            continue
        end = min((text.find(spelling) for spelling in spelled if spelling in text), default=len(text))
        token_ids += tokenizer.encode_text(text[:end])
        text = text[end:]
    return token_ids


def request(protocol: str, thinking: bool = False, tools: Sequence[str] = ()) -> ConversationRequest:
    """A request of this protocol, as its route makes it."""
    return PreparedPrompt(convert(protocol, thinking, tools), Prompt(""), []).with_output([])


def convert(protocol: str, thinking: bool, tools: Sequence[str]) -> ConversationRequest:
    options = ConversionOptions({"m": "v4.1"}, default_thinking=thinking)
    user = {"role": "user", "content": "hi"}
    if protocol == "chat":
        functions = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in tools]
        return convert_chat_request({"model": "m", "messages": [user], "tools": functions}, options)
    if protocol == "responses":
        functions = [{"type": "function", "name": name, "parameters": SCHEMA} for name in tools]
        return convert_responses_request({"model": "m", "input": [user], "tools": functions}, options)
    functions = [{"name": name, "input_schema": SCHEMA} for name in tools]
    return convert_messages_request({"model": "m", "messages": [user], "tools": functions}, options)


def open_reader(protocol: str, converted: ConversationRequest, tokenizer: Tokenizer | None) -> RecipeReader[Any]:
    """The reader that the protocol's route makes."""
    if protocol == "chat":
        return ChatChoice(ChatStream(converted, "chatcmpl-1", "m", 0, tokenizer))
    if protocol == "responses":
        return RecipeReader(ResponsesStream(converted, "resp_1", "m", 0, tokenizer))
    return MessageReader(MessagesStream(converted, "msg_1", "m", 0, tokenizer, new_call_id))


def events_of_text(reader: RecipeReader[Any], pieces: Sequence[str], reason: str = "stop") -> list[dict[str, Any]]:
    """Every event of an output that arrives in these pieces."""
    events = reader.stream.start(3)
    for piece in pieces:
        events += reader.stream.push_text(piece, 1)
    return events + reader.finish(reason)


def events_of_tokens(reader: RecipeReader[Any], token_ids: Sequence[int], reason: str = "stop") -> list[dict[str, Any]]:
    events = reader.stream.start(3)
    for token_id in token_ids:
        piece, stop = reader.push(token_id, None)
        events += reader.add(Delta([token_id], [piece]))
        if stop is not None:
            return events
    return events + reader.finish(reason)


def joined(protocol: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Reasoning, text, calls [id, name, arguments] and how it ended: what a client makes of the events."""
    return {"chat": _join_chat, "responses": _join_responses, "messages": _join_messages}[protocol](events)


def whole(protocol: str, response: dict[str, Any]) -> dict[str, Any]:
    """The same of an answer that was not streamed; arguments as JSON text."""
    out: dict[str, Any] = {"reasoning": "", "text": "", "calls": []}
    if protocol == "chat":
        choice = response["choices"][0]
        message = choice["message"]
        out |= {"reasoning": message.get("reasoning_content") or "", "text": message["content"] or ""}
        functions = [(call["id"], call["function"]) for call in message.get("tool_calls", [])]
        out["calls"] = [[call_id, function["name"], function["arguments"]] for call_id, function in functions]
        return out | {"end": choice["finish_reason"]}
    if protocol == "responses":
        for item in response["output"]:
            if item["type"] == "reasoning":
                out["reasoning"] += item["content"][0]["text"]
            elif item["type"] == "message":
                out["text"] += item["content"][0]["text"]
            else:
                out["calls"].append([item["call_id"], item["name"], item["arguments"]])
        return out | {"end": response["status"]}
    for block in response["content"]:
        if block["type"] == "thinking":
            out["reasoning"] += block["thinking"]
        elif block["type"] == "text":
            out["text"] += block["text"]
        else:
            out["calls"].append([block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False)])
    return out | {"end": response["stop_reason"]}


def _join_chat(events: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {"reasoning": "", "text": "", "calls": []}
    for choice in (event["choices"][0] for event in events):
        delta = choice["delta"]
        out["reasoning"] += delta.get("reasoning_content") or ""
        out["text"] += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                out["calls"].append([call["id"], call["function"]["name"], ""])
            out["calls"][call["index"]][2] += call["function"]["arguments"]
    return out | {"end": events[-1]["choices"][0]["finish_reason"]}


def _join_responses(events: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {"reasoning": "", "text": "", "calls": []}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        kind = event["type"]
        if kind == "response.reasoning_text.delta":
            out["reasoning"] += event["delta"]
        elif kind == "response.output_text.delta":
            out["text"] += event["delta"]
        elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            out["calls"].append([event["item"]["call_id"], event["item"]["name"], ""])
        elif kind == "response.function_call_arguments.delta":
            out["calls"][-1][2] += event["delta"]
    return out | {"end": events[-1]["response"]["status"]}


def _join_messages(events: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {"reasoning": "", "text": "", "calls": []}
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            out["calls"].append([event["content_block"]["id"], event["content_block"]["name"], ""])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            out["reasoning"] += delta.get("thinking", "")
            out["text"] += delta.get("text", "")
            if delta["type"] == "input_json_delta":
                out["calls"][-1][2] += delta["partial_json"]
    return out | {"end": events[-2]["delta"]["stop_reason"]}
