"""/v1/messages with the real Anthropic client."""

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.server.process import KEY, MODEL, Server, start_server

HI: Any = [{"role": "user", "content": "What is a lamp?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "extra_body": {"temperature": 0}}
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the current weather for a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "City name"}},
        "required": ["city"],
    },
}
PNG = "iVBORw0KGgo="


def check_shape(answer: httpx.Response, status: int, kind: str = "invalid_request_error", param: str = "") -> str:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == kind
    message = body["error"]["message"]
    assert param in message and message and "\n" not in message and "Traceback" not in message
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    return message


def prompt(server: Server, **body: Any) -> str:
    answer = server.http.post("/v1/messages/render", json={"model": MODEL, "messages": HI} | body)
    return answer.raise_for_status().json()["prompt"]


def test_answer_equals_chat(server: Server) -> None:
    message = server.messages_client.messages.create(**GREEDY, messages=HI, system="Be brief.")
    chat: Any = [{"role": "system", "content": "Be brief."}, *HI]
    same = server.client.chat.completions.create(model=MODEL, messages=chat, temperature=0, max_tokens=16)
    (block,) = message.content
    assert block.type == "text" and block.text == same.choices[0].message.content
    assert message.id.startswith("msg_") and message.role == "assistant" and message.model == MODEL
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert same.usage is not None
    assert (message.usage.input_tokens, message.usage.output_tokens) == (same.usage.prompt_tokens, 16)
    counted = server.messages_client.messages.count_tokens(model=MODEL, messages=HI, system="Be brief.")
    assert counted.input_tokens == message.usage.input_tokens


@pytest.mark.parametrize("thinking", [False, True])
def test_stream_equals_the_whole_answer(server: Server, thinking: bool) -> None:
    mode: Any = {"type": "enabled", "budget_tokens": 1024} if thinking else {"type": "disabled"}
    whole = server.messages_client.messages.create(**GREEDY, messages=HI, thinking=mode)
    events = list(server.messages_client.messages.create(**GREEDY, messages=HI, thinking=mode, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-2:] == ["message_delta", "message_stop"]
    with server.messages_client.messages.stream(**GREEDY, messages=HI, thinking=mode) as stream:
        final = stream.get_final_message()
    assert [block.model_dump() for block in final.content] != [] and final.usage == whole.usage
    block, same = whole.content[0], final.content[0]
    if thinking:
        assert block.type == same.type == "thinking" and block.thinking == same.thinking
        assert block.signature and same.signature
    else:
        assert block.type == same.type == "text" and block.text == same.text


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences(server: Server, stream: bool) -> None:
    text = server.messages_client.messages.create(**GREEDY, messages=HI).content[0].text  # type: ignore[union-attr]
    stop = text[6:9]
    asked: dict[str, Any] = {**GREEDY, "messages": HI, "stop_sequences": ["never", stop]}
    if stream:
        with server.messages_client.messages.stream(**asked) as events:
            message: Any = events.get_final_message()
    else:
        message = server.messages_client.messages.create(**asked)
    assert message.content[0].text == text[: text.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_an_answer_that_was_begun_goes_on(server: Server) -> None:
    begun = [*HI, {"role": "assistant", "content": "A lamp is"}]
    assert prompt(server, messages=begun).endswith("</think>A lamp is")
    assert server.messages_client.messages.create(**GREEDY, messages=begun).content  # type: ignore[arg-type]


def test_history_of_every_kind_of_block(server: Server) -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A lamp shines."}}
    history = [
        {"role": "user", "content": [document, {"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I call it.", "signature": "msg_1"},
            {"type": "redacted_thinking", "data": "xyz"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "Thanks."}]},
    ]  # fmt: skip
    thinking = {"type": "adaptive"}
    shown = prompt(server, messages=history, tools=[WEATHER], thinking=thinking)
    assert "A lamp shines.\n\nWeather?" in shown and "<tool_result>sunny</tool_result>\n\nThanks." in shown
    assert "<think>I call it.</think>Let me see." in shown and "xyz" not in shown and shown.endswith("<think>")
    answer = server.messages_client.messages.create(
        **GREEDY,
        messages=history,
        tools=[WEATHER],
        thinking=thinking,  # type: ignore[arg-type]
    )
    assert answer.stop_reason in ("max_tokens", "end_turn", "tool_use")


def test_any_and_tool_open_a_call(server: Server) -> None:
    opened = "<｜DSML｜ calls>\n"
    assert prompt(server, tools=[WEATHER], tool_choice={"type": "any"}).endswith(opened)
    assert prompt(server, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"}).endswith(opened)
    assert "get_weather" not in prompt(server, tools=[WEATHER], tool_choice={"type": "none"})
    assert prompt(server, tools=[WEATHER]).endswith("</think>")


def test_a_limit_beyond_the_context_means_at_most(server: Server) -> None:
    """Clients send the limit of the models they know."""
    message = server.messages_client.messages.create(
        model=MODEL, max_tokens=32000, messages=HI, extra_body={"ignore_eos": True, "temperature": 0}
    )
    assert message.stop_reason == "max_tokens"
    assert message.usage.input_tokens + message.usage.output_tokens == 1024


def test_models_in_both_shapes(server: Server) -> None:
    (model,) = server.messages_client.models.list().data
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL) and model.created_at.year > 2000
    assert server.messages_client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(anthropic.NotFoundError):
        server.messages_client.models.retrieve("other")
    assert server.client.models.list().data[0].object == "model"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": PNG}}]}]}, "images are not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "context"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop": "x"}, "stop"),
        ({"tools": [{"name": "f"}]}, "'f'"),
        ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools[0].name"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "disable_parallel_tool_use"),
        ({"thinking": {"type": "perhaps"}}, "thinking"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"system": 5}, "system"),
        ({"n": 2}, "n"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_refused_fields_are_named(server: Server, change: dict, param: str, stream: bool) -> None:
    body = {"model": MODEL, "messages": HI, "max_tokens": 2, "stream": stream}
    check_shape(server.http.post("/v1/messages", json=body | change), 400, param=param)


def test_the_other_errors_have_the_shape_too(server: Server) -> None:
    body = {"model": "other", "messages": HI, "max_tokens": 2}
    check_shape(server.http.post("/v1/messages", json=body), 404, "not_found_error", "model")
    check_shape(server.http.post("/v1/messages", content=b"{"), 400, param="JSON")
    check_shape(server.http.post("/v1/messages", content=b" " * (33 << 20)), 413, "request_too_large")
    check_shape(server.http.get("/v1/messages"), 405)
    check_shape(server.http.get("/v1/messages/batches"), 404, "not_found_error")
    check_shape(httpx.post(f"{server.url}/v1/messages", json=body), 401, "authentication_error")
    headers = {"anthropic-version": "2023-06-01", "x-api-key": "wrong"}
    answer = httpx.get(f"{server.url}/v1/models", headers=headers)
    assert answer.status_code == 401 and answer.json()["type"] == "error"


def test_the_key_comes_in_either_header(server: Server) -> None:
    for headers in ({"x-api-key": KEY}, {"Authorization": f"Bearer {KEY}"}):
        body = {"model": MODEL, "messages": HI}
        answer = httpx.post(f"{server.url}/v1/messages/count_tokens", json=body, headers=headers)
        assert answer.status_code == 200


# The shipped checkpoint thinks and calls tools.

ASK: dict[str, Any] = {"model": "nano", "max_tokens": 120, "extra_body": {"temperature": 0}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_and_its_result(nano: Server, stream: bool) -> None:
    client = nano.messages_client
    messages: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    if stream:
        with client.messages.stream(**ASK, messages=messages, tools=[WEATHER]) as events:
            pieces = [event.partial_json for event in events if event.type == "input_json"]
            answer: Any = events.get_final_message()
    else:
        answer = client.messages.create(**ASK, messages=messages, tools=[WEATHER])
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert call.id.startswith("toolu_") and set(call.input) == {"city"}
    if stream:
        assert json.loads("".join(pieces)) == call.input and len(pieces) > 2
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 21, "sky": "sunny"}'}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    told = client.messages.create(**ASK, messages=messages, tools=[WEATHER])
    assert told.stop_reason == "end_turn" and "21" in told.content[0].text  # type: ignore[union-attr]


def test_thinking_then_answer_async(nano: Server) -> None:
    messages: Any = [{"role": "user", "content": "What is 12 + 30?"}]
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}

    async def ask() -> Any:
        async with nano.async_messages_client as client:
            async with client.messages.stream(**ASK, messages=messages, thinking=thinking) as events:
                kinds = [event.type async for event in events]
                final = await events.get_final_message()
            return kinds, final, await client.messages.create(**ASK, messages=messages, thinking=thinking)

    kinds, streamed, whole = asyncio.run(ask())
    assert [block.type for block in whole.content] == [block.type for block in streamed.content] == ["thinking", "text"]
    assert whole.content[0].thinking == streamed.content[0].thinking != ""
    assert whole.content[0].signature and whole.content[1].text == streamed.content[1].text != ""
    assert whole.stop_reason == streamed.stop_reason == "end_turn"
    assert kinds.index("signature") < kinds.index("text")
    back: Any = [*messages, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "Thanks."}]
    assert nano.messages_client.messages.create(**ASK, messages=back, thinking=thinking).content


def test_without_keys_any_key_will_do(checkpoint: Path) -> None:
    server = start_server(checkpoint, "--served-model-name", MODEL)
    try:
        client = anthropic.Anthropic(base_url=server.url, api_key="anything", max_retries=0)
        assert client.messages.create(**GREEDY, messages=HI).content
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)
