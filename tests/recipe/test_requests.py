"""Requests: what we accept beyond the public library, refusals, and that nothing but a RequestError ever comes out."""

import json
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer.recipe import (
    ConversionError,
    ConversionOptions,
    RequestError,
    convert_chat_request,
    convert_messages_request,
    convert_responses_request,
    json_text,
    render,
    render_chat,
)

MODEL = {"model": "DeepSeek-V4.1-Flash"}
OFF = {"thinking": {"type": "disabled"}}
USER = [{"role": "user", "content": "hi"}]
CONVERT = {"chat": convert_chat_request, "responses": convert_responses_request, "messages": convert_messages_request}


def prompt_of(convert: str, **body: Any) -> str:
    request = CONVERT[convert]({**MODEL, **body})
    return render(request.conversation, request.model_version).text


def test_developer_is_system() -> None:
    developer = [{"role": "developer", "content": "Be brief."}, *USER]
    system = [{"role": "system", "content": "Be brief."}, *USER]
    assert prompt_of("chat", messages=developer) == prompt_of("chat", messages=system)


def test_what_the_engine_can_do_is_passed_on() -> None:
    asked = {"n": 3, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"5": 1.5}, "top_k": 7}
    inference = convert_chat_request({**MODEL, "messages": USER, **asked, "max_completion_tokens": 9}).inference
    assert (inference.n, inference.presence_penalty, inference.frequency_penalty) == (3, 0.5, -0.5)
    assert (inference.logit_bias, inference.top_k, inference.max_tokens) == ({5: 1.5}, 7, 9)
    with pytest.raises(RequestError, match="token IDs"):
        convert_chat_request({**MODEL, "messages": USER, "logit_bias": {"x": 1}})


def test_prefill_is_continued() -> None:
    prefill = [{"role": "user", "content": "JSON"}, {"role": "assistant", "content": "{"}]
    assert prompt_of("messages", messages=prefill, **OFF).endswith("<｜Assistant｜></think>{")


def test_any_requires_a_call() -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    request = convert_messages_request(
        {**MODEL, "messages": USER, "tools": tools, "tool_choice": {"type": "any"}, **OFF}
    )
    assert request.parsing.starts_in_tool_calls
    assert request.inference.output_constraint is not None
    assert request.inference.output_constraint.kind == "tool_call_required"
    assert render(request.conversation).text.endswith("</think>\n\n<｜DSML｜ calls>\n")


def test_plain_documents_are_read_and_redacted_thinking_is_left_out() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Whole text."}}
    content = [{"type": "redacted_thinking", "data": "zzz"}, {"type": "text", "text": "b"}]
    history = [{"role": "user", "content": [document]}, {"role": "assistant", "content": content}, *USER]
    assert prompt_of("messages", messages=history, **OFF) == (
        "<｜begin▁of▁sentence｜><｜User｜>Whole text.<｜Assistant｜></think>b<｜end▁of▁sentence｜>"
        "<｜User｜>hi<｜Assistant｜></think>"
    )


def test_messages_format_reaches_prompt_and_constraint() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    body = {**MODEL, "messages": USER, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    request = convert_messages_request(body)
    assert json_text.dumps(schema) in render(request.conversation).text
    assert request.inference.output_constraint is not None
    assert json.loads(request.inference.output_constraint.schema) == schema


def test_custom_tools_become_functions() -> None:
    request = convert_responses_request({**MODEL, "input": "x", "tools": [{"type": "custom", "name": "run_sql"}]})
    assert request.custom_tools == {"run_sql"}
    assert list(request.conversation.tools[0].parameters["properties"]) == ["input"]


def test_refusals_name_the_field() -> None:
    cases = [
        ("chat", {"messages": USER, "temperature": "x"}, "temperature", RequestError),
        ("chat", {"messages": USER, "top_p": 0}, "top_p", ConversionError),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            RequestError,
        ),
        (
            "chat",
            {"messages": USER, "tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            ConversionError,
        ),
        ("responses", {"input": [{"role": "user"}]}, "input[0].content", RequestError),
        ("messages", {"messages": [{"role": "user", "content": []}]}, "messages.0", ConversionError),
    ]
    for convert, body, param, kind in cases:
        with pytest.raises(RequestError) as caught:
            CONVERT[convert]({**MODEL, **body})
        assert type(caught.value) is kind and caught.value.param == param and caught.value.status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{",
        "5",
        "nul",
        '{"a": NaN}',
        '{"a": 1e400}',
        '{"a": "\\ud800"}',
        b"\xff",
        "[" * 100000,
        '{"a": ' * 200 + "1" + "}" * 200,
        '{"a": 1} x',
        None,
        5,
        [],
        {"model": float("nan")},
        {"model": 10**400},
        {5: 6},
        {"model": object()},
    ],
)
@pytest.mark.parametrize("convert", CONVERT)
def test_what_is_not_a_json_object_is_refused(convert: str, body: Any) -> None:
    with pytest.raises(RequestError, match="invalid (JSON request|request body)"):
        CONVERT[convert](body)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(
        ["user", "assistant", "tool", "function", "text", "message", "auto", "any", "object", "reasoning"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "role",
                    "content",
                    "text",
                    "name",
                    "function",
                    "id",
                    "tools",
                    "format",
                    "schema",
                    "input",
                    "call_id",
                    "tool_calls",
                    "tool_call_id",
                    "arguments",
                    "source",
                    "effort",
                    "parameters",
                    "output",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FIELDS = [
    "messages",
    "input",
    "instructions",
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "reasoning",
    "reasoning_effort",
    "response_format",
    "text",
    "temperature",
    "top_p",
    "max_tokens",
    "stop",
    "stop_sequences",
    "stream",
    "n",
    "seed",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "output_config",
    "metadata",
    "include",
    "user",
]


@given(body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5), valid=st.booleans())
@example(body={"tool_choice": {"type": "function", "function": {"name": None}}}, valid=True)
@settings(max_examples=400, deadline=None)
def test_any_body_is_converted_or_refused(body: dict, valid: bool) -> None:
    for convert in CONVERT.values():
        start = {**MODEL, "messages": USER, "input": "hi"} if valid else MODEL
        try:
            request = convert({**start, **body})
        except RequestError as error:
            assert error.message
        else:
            render(request.conversation, request.model_version)


def test_training_text_ends_with_the_last_turn() -> None:
    history = [*USER, {"role": "assistant", "content": "Hello."}]
    closed = render_chat(history, add_generation_prompt=False)
    assert closed.text.endswith("<｜User｜>hi<｜Assistant｜></think>Hello.<｜end▁of▁sentence｜>")
    assert render_chat(history).text == closed.text + "<｜Assistant｜></think>"
    assert render_chat(USER, thinking=True, reasoning_effort="max").text.count("Reasoning Effort: 100") == 1
    with pytest.raises(ValueError, match="v4, v4.1"):
        render_chat(USER, model_version="v5")  # type: ignore[arg-type]


def test_max_tokens_are_resolved() -> None:
    def resolve(prompt: int, context: int, **body: Any) -> int:
        return convert_chat_request({**MODEL, "messages": USER, **body}).resolve_max_tokens(prompt, context)

    assert resolve(10, 10**6) == 65536 and resolve(10, 10**6, **OFF) == 8192
    assert resolve(10, 10**6, reasoning_effort="max") == 131072
    assert resolve(10, 100) == 90 and resolve(100, 100) == 1 and resolve(10, 100, max_tokens=90) == 90
    for arguments in ((10, 99, {"max_tokens": 90}), (100, 99, {})):
        with pytest.raises(ConversionError, match="maximum context length"):
            resolve(arguments[0], arguments[1], **arguments[2])


def test_aliases() -> None:
    options = ConversionOptions().with_aliases({"mine": "v4"})
    assert convert_chat_request({"model": "mine", "messages": USER}, options).model_version == "v4"
    assert options.model_versions["DeepSeek-V4.1-Flash"] == "v4.1"


@given(value=JSON)
@settings(max_examples=300, deadline=None)
def test_json_text_round_trip(value: Any) -> None:
    """Against the standard library: the text reads back as the value, and compact text is its compact text."""
    try:
        text = json_text.dumps(value)
    except ValueError:
        assert "inf" in repr(value)
        return
    again = json.loads(text)
    assert json_text.dumps(json_text.loads(text)) == text
    assert again == value or any(abs(i) >= 2**63 for i in _integers(value))


def _integers(value: Any) -> list[int]:
    if isinstance(value, dict | list):
        return [i for entry in (value.values() if isinstance(value, dict) else value) for i in _integers(entry)]
    return [value] if isinstance(value, int) else []


@given(value=st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=500)
def test_floats_read_back(value: float) -> None:
    for text in (json_text.dumps(value), json_text.compact(value)):
        again = float(text)
        assert again == value and math.copysign(1, again) == math.copysign(1, value)
        assert json.loads(text) == value


@pytest.mark.parametrize(
    ("value", "prompt_v41", "prompt_v4"),
    [
        (0.1, "0.1", "0.1"),
        (1.0, "1.0", "1.0"),
        (-0.0, "-0.0", "-0.0"),
        (1e5, "100000.0", "100000.0"),
        (1e15, "1000000000000000.0", "1000000000000000.0"),
        (1e16, "1e+16", "1e+16"),
        (1.23e-5, "1.23e-05", "0.0000123"),
        (1e-6, "1e-06", "1e-6"),
        (1.5e300, "1.5e+300", "1.5e+300"),
        (123456789012345678901, "1.2345678901234568e+20", "1.2345678901234568e+20"),
    ],
)
def test_number_spelling(value: float, prompt_v41: str, prompt_v4: str) -> None:
    """As the public library spells them: like Python in V4.1 prompts, like Rust in V4 prompts and in constraints."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": value}}}
    request = convert_chat_request({**MODEL, "messages": USER, "tools": [tool]})
    assert f'"default": {prompt_v41}}}' in render(request.conversation, "v4.1").text
    assert f'"default": {prompt_v4}}}' in render(request.conversation, "v4").text
    assert request.inference.output_constraint is not None
    assert f'"default":{prompt_v4}}}' in request.inference.output_constraint.schema


def test_json_refuses_what_it_cannot_hold() -> None:
    for value in (math.nan, math.inf, 10**400, object(), {1: 2}):
        with pytest.raises((ValueError, TypeError)):
            json_text.dumps(value)


@pytest.mark.parametrize(
    ("thinking", "effort", "expected"),
    [
        (None, None, True),
        (None, "none", False),
        ("enabled", "none", True),
        ("adaptive", None, True),
        ("disabled", "max", False),
    ],
)
def test_what_decides_about_thinking(thinking: str | None, effort: str | None, expected: bool) -> None:
    body = {**MODEL, "messages": USER, "reasoning_effort": effort, "thinking": thinking and {"type": thinking}}
    assert convert_chat_request(body).conversation.thinking is expected


def test_empty_messages_and_adjacent_reminders_per_version() -> None:
    users = [{"role": "user", "content": ""}, {"role": "user", "content": "a"}]
    reminders = [{"role": "latest_reminder", "content": "1"}, {"role": "latest_reminder", "content": "2"}]
    request = convert_chat_request({**MODEL, "messages": [*reminders, *users], **OFF})
    open_turn = "<｜Assistant｜></think>"
    assert render(request.conversation, "v4.1").text == (
        f"<｜begin▁of▁sentence｜><｜latest_reminder｜>1<｜User｜>\n\na{open_turn}"
    )
    assert render(request.conversation, "v4").text == (
        f"<｜begin▁of▁sentence｜><｜latest_reminder｜>1<｜latest_reminder｜>2<｜User｜>a{open_turn}"
    )


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("data:image/png;base64,AA==", None),
        ("https://example.com/a.png", None),
        ("data:image/tiff;base64,AA==", "unsupported file"),
        ("data:image/png;base64,!!", "Invalid base64"),
        ("data:image/png,xx", "Unsupported image_url"),
        ("file:///etc/passwd", "Unsupported image_url"),
    ],
)
def test_image_addresses(url: str, fault: str | None) -> None:
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    body = {**MODEL, "messages": [{"role": "user", "content": parts}]}
    if fault is None:
        assert [image.url for image in render(convert_chat_request(body).conversation).images] == [url]
    else:
        with pytest.raises(ConversionError, match=fault):
            convert_chat_request(body)
    assert "[Unsupported Image]" in render(convert_chat_request({**body, "model": "DeepSeek-V4-Pro"}).conversation).text
