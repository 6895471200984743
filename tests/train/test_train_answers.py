"""How answers to evaluation prompts are read and judged."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as RawTokenizer

from deepinfer.recipe import Tokenizer, render_chat
from deepinfer.train.answers import declared_tools, is_right, is_valid_call, parse_output

TOKENIZER = "deepinfer/checkpoints/nano/tokenizer.json"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Tell the time.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zone": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = """I look.</think>

<｜DSML｜ calls>
<｜DSML｜ invoke name="get_time">
<｜DSML｜ parameter name="city" string="true">Madrid</｜DSML｜ parameter>
</｜DSML｜ invoke>
</｜DSML｜ calls>"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(TOKENIZER)


@pytest.mark.parametrize(
    ("kind", "expected", "answer", "right"),
    [
        ("passage", "half past five", "Arthur gets up at half past five.", True),
        ("passage", "half past five", "Arthur gets up at six.", False),
        ("passage", "The text does not say.", "The passage does not say that.", True),
        ("arithmetic", "52", "17 + 35 is 52.", True),
        ("arithmetic", "52", "The answer is 520.", False),
        ("arithmetic", "52", "I do not know.", False),
        ("json", '{"a": 1, "b": "x"}', '{"b": "x", "a": 1}', True),
        ("json", '{"a": 1}', '{"a": 1', False),
    ],
)
def test_judging_text(kind, expected, answer, right):
    assert is_right(kind, expected, answer, []) is right


def test_calls_are_parsed_behind_reasoning(tokenizer):
    ids = RawTokenizer.from_file(TOKENIZER).encode(CALL, add_special_tokens=False).ids  # splits control tokens
    answer, calls = parse_output(ids, tokenizer, thinking=True)
    assert answer == "" and calls == [{"name": "get_time", "arguments": {"city": "Madrid"}}]
    assert is_right("tool", json.dumps(calls), answer, calls)
    assert not is_right("tool", json.dumps([{"name": "get_time", "arguments": {"city": "Rome"}}]), answer, calls)


def test_validity_of_calls_against_the_prompts_schemas(tokenizer):
    prompt = render_chat([{"role": "user", "content": "x"}], [TOOL], thinking=False)
    tools = declared_tools(prompt.text)
    assert list(tools) == ["get_time"]
    assert is_valid_call({"name": "get_time", "arguments": {"city": "Rome"}}, tools)
    assert is_valid_call({"name": "get_time", "arguments": {"city": "Rome", "zone": "CET"}}, tools)
    assert not is_valid_call({"name": "get_date", "arguments": {"city": "Rome"}}, tools)
    assert not is_valid_call({"name": "get_time", "arguments": {"zone": "CET"}}, tools)
    assert not is_valid_call({"name": "get_time", "arguments": {"city": "Rome", "day": 1}}, tools)
    assert not is_valid_call({"name": "get_time", "arguments": None}, tools)
