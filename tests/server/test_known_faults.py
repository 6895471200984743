"""Faults that users of other servers reported, each as a test of the right behaviour.  Test names carry the report.

Which test fails if this server had the fault (those without a file name are here, those of stop strings in
test_stop_strings.py):

tool calls lost at chunk borders (sglang 35563)
    test_sglang_35563_no_call_is_lost_at_any_split
call text left in the content (sglang 17593)
    test_sglang_17593_no_call_text_is_left_in_the_content
arguments sent as one lump (sglang 14711, PR 19662)
    test_sglang_14711_arguments_stream_as_they_are_produced
a reply without </think> vanishes (vllm 48645)
    test_vllm_48645_a_reply_without_think_end_is_in_the_content, test_vllm_48645_cut_off_while_thinking_stays_reasoning,
    test_vllm_48645_a_call_without_think_end_is_a_call
bad grammars crash the server (vllm 17313, PR 45346, PR 37642); unbounded white space or numbers (vllm 38696, 52011)
    test_vllm_17313_bad_grammars_are_refused_and_disturb_nobody, as long as no grammar is enforced
tool schemas that are odd do the same
    test_vllm_17313_odd_tool_schemas_disturb_nobody
part of a stop string is sent (vllm 3574, aprender PR 2019)
    test_vllm_3574_nothing_of_a_stop_string_is_sent_early,
    test_vllm_3574_stream_equals_whole_with_and_without_the_stop_string
tokens and log-probabilities past a stop string (vllm PR 47616)
    test_vllm_47616_everything_is_cut_at_the_token_that_completes_the_stop,
    test_vllm_47616_usage_and_ids_are_cut_where_the_text_is
a disconnect does not stop the work (vllm 54947, PR 42263, PR 7111)
    test_vllm_54947_a_disconnect_stops_the_work, test_vllm_54947_a_disconnect_between_two_chunks_of_the_prompt,
    test_disconnect.py: test_disconnect_aborts_every_sequence (n, lists), test_disconnect_while_waiting_and_prefilling
a late event for a request that is gone (LMCache 4185, 3688)
    tests/engine/test_engine_process.py: test_a_hundred_random_cancels_leave_nothing_behind,
    test_late_news_does_not_reach_a_new_request_of_the_same_id
Messages: ids, order, arguments, list results (vllm PR 34053); late system text (vllm 48874)
    test_vllm_34053_ids_order_and_arguments_of_a_message, test_vllm_34053_a_tool_result_in_list_form_is_its_text,
    test_vllm_48874_system_text_after_a_user_turn_stands_at_its_place,
    test_messages.py: test_a_tool_call_and_its_result (official client)
usage differs between stream and whole (sglang 4707, omlx 919)
    test_sglang_4707_usage_is_the_same_streamed_or_not
internal settings as request fields (sglang 36855)
    test_sglang_36855_internal_settings_are_no_request_fields
a step hangs (sglang 33549)
    tests/engine/test_engine_process.py: test_an_engine_that_hangs_is_restarted
replies are empty while health is green (spark-vllm-docker 358)
    test_engine_failure.py: test_spark_358_health_is_not_green_while_nothing_can_be_generated

Of features that are not there yet: prefix caching (ATOM 1417, vllm 44701, openvino.genai 3722, 1Cat 205, vllm-ascend
16270), speculation (vllm 51009, 56797, the soak of spark-vllm-docker 358), grammars (openvino.genai 4081).
"""

import itertools
import json
import re
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepinfer.errors import EngineStoppedError
from deepinfer.recipe import Tokenizer
from deepinfer.server.responses import ResponseAnswer
from deepinfer.server.streams import as_api_error
from deepinfer.server.text_engine import Delta
from tests.server.forced import (
    PROTOCOLS,
    events_of_text,
    events_of_tokens,
    force,
    joined,
    open_reader,
    request,
    whole,
)
from tests.server.process import KEY, MODEL, Server, lines_of, start_server

THREE_CALLS = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="now">\n\n</｜DSML｜ invoke>\n'
    '<｜DSML｜ invoke name="here">\n\n</｜DSML｜ invoke>\n'
    '<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="city" string="false">-7</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
NAMES = ("now", "here", "weather")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(checkpoint / "tokenizer.json")


def splits(text: str) -> list[list[str]]:
    """At every place, at every two tag borders, into characters, and not at all."""
    borders = sorted({place for match in re.finditer(r"<[^>]*>", text) for place in match.span()})
    two = [[text[:i], text[i:]] for i in range(len(text) + 1)]
    three = [[text[:i], text[i:j], text[j:]] for i, j in itertools.combinations(borders, 2)]
    return [*two, *three, list(text), [text]]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sglang_35563_no_call_is_lost_at_any_split(protocol: str) -> None:
    converted = request(protocol, tools=NAMES)
    for pieces in splits(f"Wait.\n\n{THREE_CALLS}"):
        reader = open_reader(protocol, converted, None)
        streamed = joined(protocol, events_of_text(reader, pieces))
        answer = whole(protocol, reader.stream.response())
        assert streamed == answer, pieces
        assert [call[1] for call in answer["calls"]] == list(NAMES), pieces
        assert [json.loads(call[2]) for call in answer["calls"]] == [{}, {}, {"city": -7}], pieces
        assert len({call[0] for call in answer["calls"]}) == 3 and answer["text"] == "Wait."


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("thinking", [False, True])
def test_sglang_17593_no_call_text_is_left_in_the_content(protocol: str, thinking: bool, tokenizer: Tokenizer) -> None:
    output = f"I see.</think>\n\nWait.\n\n{THREE_CALLS}" if thinking else f"Wait.\n\n{THREE_CALLS}"
    reader = open_reader(protocol, request(protocol, thinking, NAMES), tokenizer)
    events = events_of_tokens(reader, [*force(tokenizer, output), tokenizer.control_id("eos")])
    answer = whole(protocol, reader.stream.response())
    assert joined(protocol, events) == answer
    assert (answer["text"], answer["reasoning"]) == ("Wait.", "I see." if thinking else "")
    assert "DSML" not in json.dumps(events, ensure_ascii=False) and len(answer["calls"]) == 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sglang_14711_arguments_stream_as_they_are_produced(protocol: str, tokenizer: Tokenizer) -> None:
    """Once the value has begun, no more than a few tokens pass without news, and no piece is the whole."""
    value = "one two three four five six seven eight nine ten " * 4
    head = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="now">\n<｜DSML｜ parameter name="city" string="true">'
    reader = open_reader(protocol, request(protocol, tools=NAMES), tokenizer)
    reader.stream.start(3)
    for token_id in force(tokenizer, head):
        reader.push(token_id, None)
    sizes = [len(reader.push(token_id, None)[0]) for token_id in tokenizer.encode_text(value)]
    assert sum(sizes) > len(sizes) / 2
    assert all(any(sizes[start : start + 4]) for start in range(len(sizes) - 4))


ENDS = {"chat": ("stop", "length"), "responses": ("completed", "incomplete"), "messages": ("end_turn", "max_tokens")}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("tools", [(), NAMES])
def test_vllm_48645_a_reply_without_think_end_is_in_the_content(
    protocol: str, tools: Sequence[str], tokenizer: Tokenizer
) -> None:
    reader = open_reader(protocol, request(protocol, True, tools), tokenizer)
    events = events_of_tokens(reader, [*force(tokenizer, "Good morning!"), tokenizer.control_id("eos")])
    answer = whole(protocol, reader.stream.response())
    assert joined(protocol, events) == answer
    assert answer["text"] == answer["reasoning"] == "Good morning!"
    assert answer["end"] == ENDS[protocol][0]
    assert "end▁of▁sentence" not in json.dumps(events, ensure_ascii=False)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_vllm_48645_cut_off_while_thinking_stays_reasoning(protocol: str, tokenizer: Tokenizer) -> None:
    reader = open_reader(protocol, request(protocol, True), tokenizer)
    events = events_of_tokens(reader, force(tokenizer, "Good mor"), "length")
    answer = whole(protocol, reader.stream.response())
    assert joined(protocol, events) == answer
    assert (answer["text"], answer["reasoning"], answer["end"]) == ("", "Good mor", ENDS[protocol][1])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_vllm_48645_a_call_without_think_end_is_a_call(protocol: str, tokenizer: Tokenizer) -> None:
    reader = open_reader(protocol, request(protocol, True, NAMES), tokenizer)
    events = events_of_tokens(reader, [*force(tokenizer, f"Hm.\n\n{THREE_CALLS}"), tokenizer.control_id("eos")])
    answer = whole(protocol, reader.stream.response())
    assert joined(protocol, events) == answer
    assert (answer["text"], answer["reasoning"], len(answer["calls"])) == ("", "Hm.", 3)


RECURSIVE = {"$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"}
# An empty schema and a recursive one are schemas like any other.
SCHEMAS: list[Any] = ["", {"$ref": "#/nope"}, {"$ref": "#"}, {"enum": ["x" * (1 << 20)]}, {"type": "nothing"}]
BAD_GRAMMARS: list[dict[str, Any]] = [
    *({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": one}}} for one in SCHEMAS),
    *({"structured_outputs": {"regex": one}} for one in ("(", "[a", "a(?=b)")),
    {"structured_outputs": {"json_object": False}},
    {"structured_outputs": {"json": ""}},
    {"structured_outputs": {"regex": "a", "json": {}}},
    {"guided_regex": "(", "guided_json": "{"},
    {"response_format": {"type": "regex", "regex": "("}},
    {"response_format": 7},
]


@contextmanager
def eight_streams(server: Server) -> Iterator[None]:
    """Eight clients generate meanwhile; each must get all of its tokens."""
    body = {"model": MODEL, "max_tokens": 300, "ignore_eos": True, "return_token_ids": True}

    def ask(number: int) -> dict[str, Any]:
        return server.http.post("/v1/completions", json=body | {"prompt": f"Once {number}"}).json()["choices"][0]

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, number) for number in range(8)]
        server.wait_for("deepinfer:num_requests_running", 8)
        yield
        answers = [one.result() for one in running]
    assert [(answer["finish_reason"], len(answer["token_ids"])) for answer in answers] == [("length", 300)] * 8
    server.wait_for("deepinfer:kv_cache_usage_perc", 0)


def test_vllm_17313_bad_grammars_are_refused_and_disturb_nobody(server: Server) -> None:
    with eight_streams(server):
        for change in BAD_GRAMMARS:
            for path in ("/v1/chat/completions", "/v1/completions"):
                body = {"model": MODEL, "max_tokens": 4, **ROUTES[path]} | change
                # A schema of a megabyte makes a prompt that fits into no context.
                fields = {*change, "messages"} if len(str(change)) > 1 << 20 else change
                answer = server.http.post(path, json=body)
                error = answer.json()["error"]
                assert answer.status_code == 400, (path, change)
                assert error["type"] == "invalid_request_error" and error["param"].split(".")[0] in fields
    assert server.http.get("/health_generate").status_code == 200


def test_vllm_17313_odd_tool_schemas_disturb_nobody(server: Server) -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}}
    with eight_streams(server):
        for schema in [*SCHEMAS, deep, {"type": "object", "properties": RECURSIVE}]:
            tool = {"type": "function", "function": {"name": "now", "parameters": schema}}
            body = {"model": MODEL, **ROUTES["/v1/chat/completions"], "max_tokens": 1, "tools": [tool]}
            answer = server.http.post("/v1/chat/completions", json=body)
            assert answer.status_code in (200, 400), answer.text
    assert server.http.get("/health_generate").status_code == 200


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 900},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 900},
    "/v1/responses": {"input": "hi", "max_output_tokens": 900},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 900},
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_vllm_54947_a_disconnect_stops_the_work(server: Server, path: str, stream: bool) -> None:
    server.wait_for("deepinfer:num_requests_running", 0)
    aborted = server.metric("deepinfer:request_success_total", finished_reason="abort")
    body = json.dumps({"model": MODEL, "ignore_eos": True, "stream": stream, **ROUTES[path]})
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nx-api-key: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        server.wait_for("deepinfer:num_requests_running", 1)
        generated = server.metric("deepinfer:generation_tokens_total")
    server.wait_for("deepinfer:num_requests_running", 0, seconds=5)
    server.wait_for("deepinfer:request_success_total", aborted + 1, finished_reason="abort")
    assert server.metric("deepinfer:generation_tokens_total") - generated < 600
    assert server.metric("deepinfer:kv_cache_usage_perc") == 0


def test_vllm_54947_a_disconnect_between_two_chunks_of_the_prompt(checkpoint: Path) -> None:
    """One long prompt in chunks of 8 tokens: the client leaves before the first token."""
    server = start_server(checkpoint, "--served-model-name", MODEL, "--api-key", KEY, "--prefill-chunk-size", "8")
    try:
        body = json.dumps({"model": MODEL, "prompt": [50] * 1000, "max_tokens": 20, "ignore_eos": True})
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nx-api-key: {KEY}\r\nContent-Length: {len(body)}"
            connection.sendall(f"{head}\r\n\r\n{body}".encode())
            server.wait_for("deepinfer:num_requests_running", 1)
        server.wait_for("deepinfer:request_success_total", 1, seconds=10, finished_reason="abort")
        server.wait_for("deepinfer:num_requests_running", 0, seconds=5)
        assert server.metric("deepinfer:generation_tokens_total") == 0
        assert server.metric("deepinfer:iteration_tokens_total_sum") < 1000, "the rest of the prompt was not read"
        assert server.metric("deepinfer:kv_cache_usage_perc") == 0
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)


@pytest.mark.parametrize("path", ROUTES)
def test_sglang_4707_usage_is_the_same_streamed_or_not(server: Server, path: str) -> None:
    body = {"model": MODEL, "temperature": 0, **ROUTES[path]} | {"stream_options": {"include_usage": True}}
    body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 7
    usage = server.http.post(path, json=body).json()["usage"]
    events = []
    with server.http.stream("POST", path, json=body | {"stream": True}) as answer:
        events = [json.loads(line[6:]) for line in lines_of(answer) if line.startswith("data: {")]
    last = [event.get("usage") or event.get("response", {}).get("usage") for event in events]
    assert [found for found in last if found][-1] == usage
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    assert details.get("cached_tokens", details.get("cache_read_input_tokens")) == 0
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 7


@pytest.mark.parametrize("path", ROUTES)
def test_sglang_36855_internal_settings_are_no_request_fields(server: Server, path: str) -> None:
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True, **ROUTES[path]}
    body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 5
    internal = {
        "bootstrap_host": "2.2.2.2", "request_id": "x", "owner": "0", "is_prefill": False, "state_slot": 0,
        "block_table": [0], "num_computed_tokens": 9, "yoco_prefill_truncation_mode": "mask", "num_blocks": 1,
    }  # fmt: skip

    def answer(extra: dict[str, Any]) -> str:
        got = server.http.post(path, json=body | extra)
        assert got.status_code == 200, got.text
        return re.sub(r'"(?:id|encrypted_content)":"[^"]*"|"\w*(?:created|completed)\w*":\d+', "", got.text)

    assert answer(internal) == answer({})


@pytest.mark.parametrize("stream", [False, True])
def test_vllm_34053_ids_order_and_arguments_of_a_message(stream: bool, tokenizer: Tokenizer) -> None:
    reader = open_reader("messages", request("messages", True, NAMES), tokenizer)
    output = f"I see.</think>{THREE_CALLS}"
    if not stream:
        events_of_tokens(reader, force(tokenizer, output))
        message = reader.stream.response()
        assert [block["type"] for block in message["content"]] == ["thinking", "tool_use", "tool_use", "tool_use"]
        assert message["id"].startswith("msg_") and message["stop_reason"] == "tool_use"
        return
    events = events_of_tokens(reader, force(tokenizer, output))
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    index, is_open = -1, False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == index + 1
            index, is_open = index + 1, True
        elif event["type"] in ("content_block_delta", "content_block_stop"):
            assert is_open and event["index"] == index
            is_open = event["type"] == "content_block_delta"
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == ["thinking", "tool_use", "tool_use", "tool_use"]  # no empty text
    assert all(re.fullmatch(r"toolu_\w{24}", block["id"]) for block in starts[1:])
    assert joined("messages", events)["calls"][2][2] == '{"city": -7}'


def test_vllm_34053_a_tool_result_in_list_form_is_its_text(server: Server) -> None:
    body = {
        "model": MODEL,
        "tools": [{"name": "now", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "time?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [
                {"type": "text", "text": "it is"}, {"type": "text", "text": "noon"}]}]},
        ],
    }  # fmt: skip
    prompt = server.http.post("/v1/messages/render", json=body).json()["prompt"]
    assert "<tool_result>it is\n\nnoon</tool_result>" in prompt


def test_vllm_48874_system_text_after_a_user_turn_stands_at_its_place(server: Server) -> None:
    messages = [{"role": "user", "content": "one"}, {"role": "system", "content": "late"},
                {"role": "user", "content": [{"type": "text", "text": "two"}]}]  # fmt: skip
    body = {"model": MODEL, "max_tokens": 4, "system": "early", "messages": messages}
    prompt = server.http.post("/v1/messages/render", json=body).json()["prompt"]
    assert "<｜System｜>early<｜User｜>one<｜System｜>late<｜User｜>two<｜Assistant｜></think>" in prompt
    for stream in (False, True):
        assert server.http.post("/v1/messages", json=body | {"stream": stream}).status_code == 200


@pytest.mark.parametrize("error", [RuntimeError("the step failed"), EngineStoppedError("it died")])
def test_a_response_that_fails_says_so(tokenizer: Tokenizer, error: Exception) -> None:
    """No report: the counterpart of 54947, when the engine rather than the client goes away."""
    reader = open_reader("responses", request("responses"), tokenizer)
    kept: list[dict[str, Any]] = []

    answer = ResponseAnswer(reader, 3, kept.append)
    answer.begin()
    for token_id in force(tokenizer, "half an ans"):
        answer.add(0, Delta([token_id], [reader.push(token_id, None)[0]]))
    last = answer.fail(as_api_error(error))[-1]
    answer.close()
    assert last["type"] == "response.failed" and last["response"] == kept[0]
    stopped = "the engine stopped before the answer was complete"
    message = stopped if isinstance(error, EngineStoppedError) else "internal server error"
    assert kept[0]["status"] == "failed" and kept[0]["error"] == {"code": "server_error", "message": message}
    assert kept[0]["output"][0]["content"][0]["text"] == "half an ans"


def test_the_list_above_names_tests_that_exist() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.parent.rglob("test_*.py"))
    named = re.findall(r"(?<![/\w])test_\w+(?!\.py)\b", __doc__ or "")
    assert len(named) > 20
    for name in named:
        assert f"def {name}(" in tests, name
