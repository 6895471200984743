"""Control tokens exist only where the renderer put them, whatever the client writes into any field."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.recipe import (
    Tokenizer,
    convert_chat_request,
    convert_messages_request,
    convert_responses_request,
    encode_prompt,
    render,
)
from deepinfer.recipe.control_tokens import CONTROL_TOKENS, GROUNDING_ROLES

Fill = Callable[[str], str]
MODEL = {"model": "DeepSeek-V4.1-Flash"}
GROUNDING = {CONTROL_TOKENS[role] for role in GROUNDING_ROLES}


def schema(fill: Fill) -> dict:
    return {
        "type": "object",
        "title": fill("title"),
        "description": fill("description"),
        "properties": {fill("property"): {"type": "string", "enum": [fill("enum")], "description": fill("inner")}},
    }


def chat(fill: Fill, assistant: Fill) -> dict:
    call = {
        "id": fill("id"),
        "type": "function",
        "function": {
            "name": fill("call name"),
            "arguments": json.dumps({fill("key"): fill("value"), "n": [fill("n")]}),
        },
    }
    return {
        **MODEL,
        "messages": [
            {"role": "system", "content": fill("system"), "name": fill("name")},
            {
                "role": "user",
                "content": [{"type": "text", "text": fill("part 1")}, {"type": "text", "text": fill("part 2")}],
            },
            {
                "role": "assistant",
                "content": assistant("answer"),
                "reasoning_content": assistant("reasoning"),
                "tool_calls": [call],
            },
            {"role": "tool", "tool_call_id": call["id"], "content": fill("result")},
            {"role": "latest_reminder", "content": fill("reminder")},
            {"role": "developer", "content": fill("developer")},
            {"role": "user", "content": fill("user"), "name": fill("name")},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "description": fill("tool"), "parameters": schema(fill)}}
        ],
        "response_format": {"type": "json_schema", "json_schema": {"name": fill("format"), "schema": schema(fill)}},
        "user": fill("user id"),
    }


def responses(fill: Fill, assistant: Fill) -> dict:
    return {
        **MODEL,
        "instructions": fill("instructions"),
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": fill("part")}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": assistant("reasoning")}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": assistant("answer")}]},
            {
                "type": "function_call",
                "call_id": "1",
                "name": fill("name"),
                "namespace": fill("space"),
                "arguments": fill("arguments"),
            },
            {"type": "custom_tool_call", "call_id": "2", "name": fill("custom"), "input": fill("input")},
            {"type": "function_call_output", "call_id": "1", "output": fill("output")},
            {
                "type": "custom_tool_call_output",
                "call_id": "2",
                "output": [{"type": "input_text", "text": fill("output")}],
            },
            {"role": "developer", "content": fill("developer")},
            {"role": "user", "content": fill("user")},
        ],
        "tools": [
            {
                "type": "namespace",
                "name": "n",
                "description": fill("space"),
                "tools": [{"type": "function", "name": "f", "description": fill("tool"), "parameters": schema(fill)}],
            },
            {
                "type": "custom",
                "name": "c",
                "description": fill("custom"),
                "format": {"type": "grammar", "syntax": fill("syntax"), "definition": fill("grammar")},
            },
        ],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema(fill)}},
        "metadata": {"a": fill("metadata")},
    }


def messages(fill: Fill, assistant: Fill) -> dict:
    return {
        **MODEL,
        "system": [{"type": "text", "text": fill("system")}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": fill("user")},
                    {
                        "type": "document",
                        "title": fill("title"),
                        "source": {"type": "text", "media_type": "text/plain", "data": fill("document")},
                    },
                    {
                        "type": "document",
                        "source": {"type": "base64", "media_type": fill("media type"), "data": "AA=="},
                    },
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": assistant("thinking"), "signature": fill("signature")},
                    {"type": "text", "text": assistant("answer")},
                    {"type": "tool_use", "id": fill("id"), "name": fill("name"), "input": {fill("key"): fill("value")}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": fill("id"),
                        "content": [{"type": "text", "text": fill("result")}],
                    },
                ],
            },
        ],
        "tools": [{"name": "f", "description": fill("tool"), "input_schema": schema(fill)}],
        "output_config": {"format": {"type": "json_schema", "schema": schema(fill)}},
        "metadata": {"user_id": fill("user id")},
    }


PROTOCOLS: list[tuple[Callable[..., Any], Callable[[Fill, Fill], dict]]] = [
    (convert_chat_request, chat),
    (convert_responses_request, responses),
    (convert_messages_request, messages),
]


def check(tokenizer: Tokenizer, poison: str, assistant_poison: str) -> None:
    """The control tokens of a poisoned request are those of the harmless one, and its text is kept letter by letter."""
    for convert, build in PROTOCOLS:
        harmless = convert(build(lambda where: where, lambda where: where))
        request = convert(build(lambda where: f"{where}{poison}", lambda where: f"{where}{assistant_poison}"))
        for version in ("v4", "v4.1"):
            prompt = render(request.conversation, version)
            expected = render(harmless.conversation, version).control_roles
            assert prompt.control_roles == expected
            token_ids = encode_prompt(prompt, tokenizer)
            written = [tokenizer.roles.get(i, "unknown") for i in token_ids if i in tokenizer.added_ids]
            assert written == list(expected)
            assert tokenizer.decode(token_ids) == prompt.text
            for (start, end), role in zip(prompt.control_ranges, prompt.control_roles, strict=True):
                assert prompt.text[start:end] == CONTROL_TOKENS[role]


FRAGMENTS = [
    *CONTROL_TOKENS.values(),
    "<｜Us",
    "er｜>",
    "<",
    "｜",
    "▁",
    "</",
    "think>",
    "｜DSML",
    "｜",
    '"',
    "\\",
    "\n",
    " ",
]


@given(
    poison=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=6).map("".join),
    assistant=st.lists(st.sampled_from([f for f in FRAGMENTS if f not in GROUNDING]), max_size=6).map("".join),
)
@settings(max_examples=150, deadline=None)
def test_no_field_can_write_a_control_token(small_tokenizer: Tokenizer, poison: str, assistant: str) -> None:
    check(small_tokenizer, poison, assistant)


def test_no_special_token_of_the_real_vocabulary_gets_through(
    deepseek_tokenizer: Tokenizer, deepseek_definition: dict
) -> None:
    every = [token["content"] for token in deepseek_definition["added_tokens"]]
    check(deepseek_tokenizer, " ".join(every), " ".join(text for text in every if text not in GROUNDING))
    check(deepseek_tokenizer, "".join(every), "".join(text for text in every if text not in GROUNDING))


def test_image_regions_are_tokens_in_assistant_turns_only(small_tokenizer: Tokenizer) -> None:
    """What the model wrote to point into an image comes back as what it was."""
    text = "<｜box｜>1,2<｜/box｜>"
    for role, expected in (("user", []), ("assistant", ["box", "box_end"])):
        body = {**MODEL, "messages": [{"role": role, "content": text}], "thinking": {"type": "disabled"}}
        prompt = render(convert_chat_request(body).conversation)
        assert [r for r in prompt.control_roles if r in GROUNDING_ROLES] == expected
        assert small_tokenizer.decode(encode_prompt(prompt, small_tokenizer)) == prompt.text
