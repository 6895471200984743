"""/v1/responses with the real OpenAI client."""

import asyncio
import json
import time
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.process import MODEL, Server, start_server
from tests.server.test_errors import check_shape

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}
UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
UNENFORCED = {"type": "object", "properties": {"a": UNIQUE}, "required": ["a"]}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "City name"}},
        "required": ["city"],
    },
    "strict": False,
}


class Weather(BaseModel):
    city: str


def prompt(server: Server, **body: Any) -> str:
    answer = server.http.post("/v1/responses/render", json={"model": MODEL} | body)
    return answer.raise_for_status().json()["prompt"]


def test_create_retrieve_delete(server: Server) -> None:
    client = server.client
    made = client.responses.create(**GREEDY, input="What is a lamp?", instructions="Be brief.", metadata={"a": "b"})
    assert made.id.startswith("resp_") and made.object == "response" and made.model == MODEL
    assert made.status == "incomplete" and made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output_text and made.instructions == "Be brief." and made.metadata == {"a": "b"}
    assert made.usage is not None and made.usage.output_tokens == 16
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a lamp?"}]
    same = client.chat.completions.create(model=MODEL, messages=chat, temperature=0, max_tokens=16)  # type: ignore[arg-type]
    assert made.output_text == same.choices[0].message.content and same.usage is not None
    assert made.usage.input_tokens == same.usage.prompt_tokens
    assert client.responses.retrieve(made.id) == made
    (item,) = client.responses.input_items.list(made.id).data
    assert item.role == "user" and item.content == "What is a lamp?"  # type: ignore[union-attr]
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


@pytest.mark.parametrize("thinking", [False, True])
def test_stream_equals_the_whole_answer(server: Server, thinking: bool) -> None:
    effort: Any = {"effort": "high" if thinking else "none"}
    whole = server.client.responses.create(**GREEDY, input="A lamp", reasoning=effort)
    events = list(server.client.responses.create(**GREEDY, input="A lamp", reasoning=effort, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert kinds[-1] == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kind = "response.reasoning_text.delta" if thinking else "response.output_text.delta"
    text = "".join(event.delta for event in events if event.type == kind)  # type: ignore[union-attr]
    (item,) = whole.output
    assert item.type == ("reasoning" if thinking else "message") and item.content is not None
    assert text == item.content[0].text  # type: ignore[union-attr]
    final = events[-1].response  # type: ignore[union-attr]
    assert final.usage == whole.usage and final.output[0].content == item.content  # type: ignore[union-attr]
    assert whole.reasoning is not None and whole.reasoning.effort == effort["effort"]


def test_logprobs(server: Server) -> None:
    answer = server.client.responses.create(
        **GREEDY, input="A lamp", include=["message.output_text.logprobs"], top_logprobs=2
    )
    entries = answer.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert entries and all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)
    plain = server.client.responses.create(**GREEDY, input="A lamp")
    assert plain.output_text == answer.output_text and not plain.output[0].content[0].logprobs  # type: ignore[union-attr]


def test_a_conversation_goes_on_from_what_is_stored(server: Server) -> None:
    client = server.client
    first = client.responses.create(**GREEDY, input="one", instructions="Once.")
    second = client.responses.create(**GREEDY, input="two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    shown = prompt(server, input="three", previous_response_id=second.id)
    said = ["one", first.output_text, "two", second.output_text, "three"]
    items = [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(said)]
    assert shown == prompt(server, input=items)
    assert "Once." not in shown, "instructions are those of one request"
    assert len(client.responses.input_items.list(second.id).data) == 3
    client.responses.delete(first.id)
    assert prompt(server, input="three", previous_response_id=second.id) == shown
    with pytest.raises(openai.BadRequestError, match="previous_response_id") as refused:
        client.responses.create(**GREEDY, input="x", previous_response_id=first.id)
    assert refused.value.param == "previous_response_id" and refused.value.code == "previous_response_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_to_be_stored_is_not(server: Server, stream: bool) -> None:
    answer = server.client.responses.create(**GREEDY, input="one", store=False, stream=stream)
    response = list(answer)[-1].response if stream else answer  # type: ignore[union-attr]
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        server.client.responses.retrieve(response.id)


def test_background_and_cancel(server: Server) -> None:
    client = server.client
    asked: dict[str, Any] = {"model": MODEL, "input": "hi", "background": True, "extra_body": {"ignore_eos": True}}
    short = client.responses.create(**asked, max_output_tokens=5)
    assert short.status == "in_progress" and short.background
    deadline = time.monotonic() + 20
    while client.responses.retrieve(short.id).status == "in_progress":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ended = client.responses.retrieve(short.id)
    assert ended.status == "incomplete" and ended.output_text
    assert client.responses.cancel(short.id) == ended, "what has ended stays as it is"
    running = client.responses.create(**asked, max_output_tokens=900)
    with pytest.raises(openai.BadRequestError, match="in progress"):
        client.responses.create(**GREEDY, input="x", previous_response_id=running.id)
    server.wait_for("deepinfer:num_requests_running", 1)
    cancelled = client.responses.cancel(running.id)
    assert cancelled.status == "cancelled" and cancelled.incomplete_details is None
    assert client.responses.retrieve(running.id).status == "cancelled"
    server.wait_for("deepinfer:num_requests_running", 0)
    assert server.metric("deepinfer:kv_cache_usage_perc") == 0
    deleted = client.responses.create(**asked, max_output_tokens=900)
    client.responses.delete(deleted.id)
    server.wait_for("deepinfer:num_requests_running", 0)


def test_a_stream_can_be_cancelled_by_its_id(server: Server) -> None:
    stream = server.client.responses.create(
        model=MODEL, input="hi", max_output_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    events = []
    for event in stream:
        events.append(event)
        if len(events) == 8:
            assert server.client.responses.cancel(events[0].response.id).status == "cancelled"  # type: ignore[union-attr]
    assert events[-1].type == "response.incomplete" and events[-1].response.status == "cancelled"
    assert len(events) < 600


def test_stop_strings(server: Server) -> None:
    text = server.client.responses.create(**GREEDY, input="A lamp").output_text
    stop = text[6:9]
    answer = server.client.responses.create(**GREEDY, input="A lamp", extra_body={"stop": stop})
    assert answer.output_text == text[: text.index(stop)] and answer.status == "completed"


USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "king", "content": "hi"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]},
         "input"),
        ({"input": "word " * 3000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"max_output_tokens": 10**30}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 2}, "n"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text"),
        ({"tools": [WEATHER | {"strict": True, "parameters": UNENFORCED}]}, "tools"),
        ({"tools": "hammer"}, "tools"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stream": True, "background": True}, "background"),
        ({"store": False, "background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"stop": [""]}, "stop"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_refused_fields_are_named(server: Server, change: dict, param: str) -> None:
    check_shape(server.http.post("/v1/responses", json={"model": MODEL, "input": USER} | change), 400, param)


def test_unknown_model_and_streamed_get(server: Server) -> None:
    check_shape(server.http.post("/v1/responses", json={"model": "other", "input": "hi"}), 404, "model")
    made = server.client.responses.create(**GREEDY, input="one")
    check_shape(server.http.get(f"/v1/responses/{made.id}?stream=true"), 400, "stream")


def test_a_key_sees_its_own_responses_only(checkpoint: Any) -> None:
    server = start_server(checkpoint, "--served-model-name", MODEL, "--api-key", "one", "--api-key", "two")
    try:
        one, two = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
        made = one.responses.create(**GREEDY, input="mine")
        assert one.responses.retrieve(made.id).id == made.id
        for call in (two.responses.retrieve, two.responses.delete, two.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        with pytest.raises(openai.BadRequestError):
            two.responses.create(**GREEDY, input="x", previous_response_id=made.id)
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)


# The shipped checkpoint thinks and calls tools.

ASK: dict[str, Any] = {"model": "nano", "temperature": 0, "max_output_tokens": 120}


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_and_its_result(nano: Server, stream: bool) -> None:
    client = nano.client
    if stream:
        with client.responses.stream(**ASK, input="What is the weather in Rome?", tools=[WEATHER]) as events:
            deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
            answer: Any = events.get_final_response()
    else:
        answer = client.responses.create(**ASK, input="What is the weather in Rome?", tools=[WEATHER])
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert answer.status == "completed" and call.name == "get_weather" and call.call_id.startswith("call_")
    assert set(json.loads(call.arguments)) == {"city"}
    if stream:
        assert "".join(deltas) == call.arguments and len(deltas) > 2
    output = '{"temperature": 21, "sky": "sunny"}'
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": output}
    told = client.responses.create(**ASK, input=[result], previous_response_id=answer.id, tools=[WEATHER])
    assert "21" in told.output_text and told.status == "completed"


def test_reasoning_then_answer_async(nano: Server) -> None:
    async def ask() -> Any:
        async with nano.async_client as client:
            async with client.responses.stream(**ASK, input="What is 12 + 30?", reasoning={"effort": "low"}) as events:
                kinds = [event.type async for event in events]
                return kinds, await events.get_final_response()

    kinds, answer = asyncio.run(ask())
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text and answer.output_text and answer.status == "completed"
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


def test_parse_helpers(nano: Server) -> None:
    """Without a format there is nothing to parse; with one, what comes back is an object of the class."""
    parsed = nano.client.responses.parse(**ASK, input="Hello")
    assert parsed.output_text and parsed.output_parsed is None
    messages: Any = [{"role": "user", "content": "Hello"}]
    chat = nano.client.chat.completions.parse(model="nano", messages=messages, max_tokens=20)
    assert chat.choices[0].message.content and chat.choices[0].message.parsed is None
    asked = nano.client.responses.parse(**ASK, input="It is 12 degrees in Rome. As JSON, please.", text_format=Weather)
    assert isinstance(asked.output_parsed, Weather)
    chat = nano.client.chat.completions.parse(
        model="nano", messages=messages, max_tokens=60, temperature=0, response_format=Weather
    )
    assert isinstance(chat.choices[0].message.parsed, Weather)
