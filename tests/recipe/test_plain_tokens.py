"""The short way of plain tokens gives what the long way gives, token for token."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.recipe import Tokenizer
from deepinfer.recipe.events import AnswerText, Event, ReasoningText
from deepinfer.recipe.output_reader import OutputReader
from deepinfer.recipe.request import ParsingOptions

PIECES = st.sampled_from(
    ["Hello", " world", "\n", "\n\n", "<", "</th", "</think>", "END", " EN", "D of", "日本", "👩‍👧", "é", "\0", '"\\',
     "<｜DSML｜", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", "{", "```json\n", "\u2028"]
)  # fmt: skip
OPTIONS = st.builds(
    ParsingOptions,
    parse_tool_calls=st.booleans(),
    parse_json_output=st.booleans(),
    thinking_initial_stage=st.sampled_from([None, "ReasoningStart", "ReasoningContinuation", "ContentContinuation"]),
    stop_sequences=st.sampled_from([(), ("END",), ("D of", "\n\n")]),
    include_stop_string=st.booleans(),
    answer_open_reasoning=st.booleans(),
)


def short_way(reader: OutputReader, token_id: int) -> list[Event]:
    text = reader.push_plain(token_id)
    if not text:
        return reader.push_tokens([token_id])
    return [ReasoningText(text) if reader.parser.is_reasoning else AnswerText(text)]


@pytest.fixture(scope="module")
def silent_and_partial(nano_tokenizer: Tokenizer) -> list[int]:
    """End of sequence, and tokens that are a part of a character."""
    partial = [i for i in range(nano_tokenizer.vocab_size) if nano_tokenizer.text_of(i) is None]
    return [nano_tokenizer.control_id("eos"), *partial[:5]]


@settings(max_examples=300, deadline=None)
@given(options=OPTIONS, data=st.data())
def test_the_short_way_is_the_long_way(
    nano_tokenizer: Tokenizer, silent_and_partial: list[int], options: ParsingOptions, data: Any
) -> None:
    written = data.draw(st.lists(st.one_of(PIECES, st.sampled_from(silent_and_partial)), max_size=12))
    token_ids = [i for part in written for i in ([part] if isinstance(part, int) else nano_tokenizer.encode_text(part))]
    names = [lambda index, _: f"call {index}"] * 2
    one, other = (OutputReader(options, nano_tokenizer, name) for name in names)
    for token_id in token_ids:
        assert short_way(one, token_id) == other.push_tokens([token_id])
        assert one.finish_reason == other.finish_reason
    assert one.finish("length") == other.finish("length")
    assert one.usage() == other.usage() and one.parser.reasoning == other.parser.reasoning


def test_most_tokens_of_prose_go_the_short_way(nano_tokenizer: Tokenizer) -> None:
    reader = OutputReader(ParsingOptions(parse_tool_calls=True), nano_tokenizer)
    token_ids = nano_tokenizer.encode_text("Once upon a time there was a lighthouse, and in it lived a keeper. " * 5)
    reader.push_tokens(token_ids[:1])  # the first may be a newline that is dropped
    assert all(reader.push_plain(token_id) for token_id in token_ids[1:])
