"""The parsers by themselves on text that was made to be costly."""

import time

from deepinfer.recipe import ParsingOptions
from deepinfer.server.parsers import END, parse, tool_calls


def test_a_run_of_ends_takes_time_in_proportion_to_its_length() -> None:
    start = time.monotonic()
    few = parse(END * 2_000 + "x", ParsingOptions())
    seconds = time.monotonic() - start
    start = time.monotonic()
    many = parse(END * 100_000 + "x", ParsingOptions())
    assert time.monotonic() - start < 5 + 500 * seconds  # in proportion: 50 times; quadratic: 2,500
    assert [type(event) for event in few] == [type(event) for event in many]


def test_ends_behind_an_answer_are_not_part_of_it() -> None:
    assert tool_calls("hello" + END * 3, []) == {"normal_text": "hello", "calls": []}
    assert tool_calls(END, []) == {"normal_text": "", "calls": []}
