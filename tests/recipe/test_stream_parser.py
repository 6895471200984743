"""Stop strings, stream parser and tool blocks: independence of chunking, and single rules."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.recipe import (
    AnswerText,
    ParsingOptions,
    ReasoningText,
    StopStrings,
    StreamParser,
    ToolCallArguments,
    ToolCallStart,
)

CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="k" string="true">v "q"\n</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="n" string="false">[1, null]</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    '<｜DSML｜ invoke name="g">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)
WORDS = [
    "a",
    "b",
    "ab",
    "\n",
    "\n\n",
    "</think>",
    "<think>",
    "<｜DSML｜",
    "</｜DSML｜",
    "STOP",
    "ST",
    "</th",
    "<",
    "{",
    "}",
    "```json\n",
    "```",
    ' invoke name="f">',
    ' parameter name="k" string="true">',
    "é",
    CALL,
]


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted(cut % (len(text) + 1) for cut in cuts)
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def read(options: ParsingOptions, pieces: list[str]) -> dict:
    parser = StreamParser(options, new_id=lambda index, empty: f"{index}{empty}")
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    out: dict = {"reasoning": "", "answer": "", "calls": [], "reason": parser.finish_reason("stop")}
    for event in events:
        match event:
            case ReasoningText(text):
                out["reasoning"] += text
            case AnswerText(text):
                out["answer"] += text
            case ToolCallStart(_, call_id, name):
                out["calls"].append([call_id, name, ""])
            case ToolCallArguments(index, text):
                out["calls"][index][2] += text
    return out


@given(
    text=st.lists(st.sampled_from(WORDS), max_size=10).map("".join),
    cuts=st.lists(st.integers(0, 400), max_size=10),
    options=st.builds(
        ParsingOptions,
        parse_tool_calls=st.booleans(),
        starts_in_tool_calls=st.booleans(),
        parse_json_output=st.booleans(),
        thinking_initial_stage=st.sampled_from(
            [None, "ReasoningStart", "ReasoningContinuation", "ContentContinuation"]
        ),
        answer_open_reasoning=st.booleans(),
        include_stop_string=st.booleans(),
        stop_sequences=st.sampled_from([(), ("STOP",), ("ab", "b"), ("\n\n", "STOPa")]),
    ),
)
@settings(max_examples=500, deadline=None)
def test_result_does_not_depend_on_chunking(text: str, cuts: list[int], options: ParsingOptions) -> None:
    whole = read(options, [text])
    assert read(options, cut(text, cuts)) == whole
    assert read(options, list(text)) == whole


def stop_oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that ends first, by brute force."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 50), max_size=10),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopStrings(stops)
    shown = ""
    for piece in cut(text, cuts):
        emitted, _ = matcher.push(piece)
        shown += emitted
        expected, stop = stop_oracle(text, stops)
        assert expected.startswith(shown)  # nothing of a stop string ever slips out
    assert (shown + matcher.finish(), matcher.stopped) == stop_oracle(text, stops)


def test_stop_strings_hold_back_no_more_than_needed() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.push("S") == ("", None)
    assert matcher.push("x") == ("Sx", None)
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])


def test_many_newlines_and_long_stops_stay_cheap() -> None:
    matcher = StopStrings(["a" * 5000 + "b"])
    shown = "".join(matcher.push("a")[0] for _ in range(20000))
    assert len(shown + matcher.finish()) == 20000


def test_reasoning_answer_and_calls() -> None:
    options = ParsingOptions(parse_tool_calls=True, thinking_initial_stage="ReasoningStart")
    out = read(options, [f"\nthought\n</think>\n\nLook:\n\n{CALL} ignored"])
    assert out["reasoning"] == "thought" and out["answer"] == "Look:" and out["reason"] == "tool_calls"
    assert [(call[0], call[1]) for call in out["calls"]] == [("0False", "f"), ("1False", "g")]
    assert json.loads(out["calls"][0][2]) == {"k": 'v "q"\n', "n": [1, None]} and out["calls"][1][2] == "{}"


def test_calls_are_text_when_no_tools_are_active() -> None:
    assert read(ParsingOptions(), [CALL])["answer"] == CALL


@pytest.mark.parametrize(
    ("invoke", "parameter", "arguments"),
    [
        ('invoke name="f"', 'parameter name="k"', {"k": "v"}),
        ('invoke name="f"', 'parameter string="false" name="k"', {"k": "v"}),
        ('invoke id="7" name="f"', 'parameter name="a b" string="true"', {"a b": "v"}),
        ('invoke name="f"', 'parameter name="k\\" string="true"', {"k\\": "v"}),
        ('invoke name="f" x="y"', 'parameter name="k" string="maybe"', {"k": "v"}),
    ],
)
@pytest.mark.parametrize("space", ["", " "])
def test_malformed_blocks_give_valid_arguments(invoke: str, parameter: str, arguments: dict, space: str) -> None:
    value = '"v"' if 'string="false"' in parameter else "v"
    out = read(
        ParsingOptions(parse_tool_calls=True),
        [
            f"<｜DSML｜{space}calls>\n<｜DSML｜{space}{invoke}>\njunk <｜DSML｜{space}{parameter}>{value}"
            f"</｜DSML｜{space}parameter>\n</｜DSML｜{space}invoke>\n</｜DSML｜{space}calls>"
        ],
    )
    assert [call[1] for call in out["calls"]] == ["f"]
    assert json.loads(out["calls"][0][2]) == arguments


def test_a_call_without_end_is_closed_by_the_next() -> None:
    text = '<｜DSML｜ calls><｜DSML｜ invoke name="f"><｜DSML｜ invoke name="g"></｜DSML｜ invoke></｜DSML｜ calls>'
    assert [call[1:] for call in read(ParsingOptions(parse_tool_calls=True), [text])["calls"]] == [
        ["f", "{}"],
        ["g", "{}"],
    ]


def test_json_mode_keeps_the_json() -> None:
    options = ParsingOptions(parse_json_output=True)
    assert read(options, ['Here you are:\n```json\n{"a": 1}\n```\nBye.'])["answer"] == ' {"a": 1} '
    assert read(options, ['{"a": "```"}'])["answer"] == '{"a": "```"}'


@pytest.mark.parametrize("repeat", [True, False])
def test_reasoning_that_is_never_closed(repeat: bool) -> None:
    options = ParsingOptions(thinking_initial_stage="ReasoningStart", answer_open_reasoning=repeat)
    out = read(options, ["\nGood mor", "ning!"])
    assert (out["reasoning"], out["answer"]) == ("Good morning!", "Good morning!" if repeat else "")
    assert read(options, ["\n\n"])["answer"] == "" and read(options, ["a</think>"])["answer"] == ""
    parser = StreamParser(options)
    parser.push("Good mor")
    assert parser.finish("length") == [], "it was cut off, and said nothing yet"
