"""Tool calls in V4.1's text format: every call of a random output satisfies its tool's schema."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import numpy as np
import pytest

from deepinfer.recipe import ConversionOptions, convert_chat_request
from deepinfer.recipe.events import AnswerText, ReasoningText, ToolCallArguments, ToolCallStart
from deepinfer.recipe.request import ParsingOptions
from deepinfer.recipe.stream_parser import StreamParser
from deepinfer.recipe.structure import answer_format, output_format
from deepinfer.structured.matcher import Grammar, Matcher
from tests.structured.grammars import EOS, allowed, compiled, feed, tokenizer, vocabulary, walk

EVERYTHING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
        "note": {"type": ["string", "null"]},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "short": {"type": "string", "minLength": 1, "maxLength": 8},
        "list": {"$ref": "#/$defs/node"},
        "either": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "number"}]},
        "mixed": {"enum": ["a", 1, None]},
        "free": {},
    },
    "required": ["city", "days", "list"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CLOSED = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def tool(name: str, parameters: Any, strict: bool | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


class Case:
    """A chat request, its grammar, and how its output is read."""

    def __init__(self, thinking: bool = False, parallel: bool = True, version: str = "v4.1", **fields: Any):
        body = {"model": "m", "messages": [{"role": "user", "content": "json"}], **fields}
        body["thinking"] = {"type": "enabled" if thinking else "disabled"}
        options = ConversionOptions({"m": version}, enforces_calls=True)  # type: ignore[dict-item]
        self.request = convert_chat_request(body, options)
        self.schemas = {entry["function"]["name"]: entry["function"]["parameters"] for entry in fields["tools"]}
        whole = output_format(self.request, answer_format(self.request), tokenizer().control_ids, parallel)
        self.grammar: Grammar | None = None
        if whole is not None:
            so_args = {"schema_type": "structural_tag", "schema": {"type": "structural_tag", "format": whole}}
            self.grammar = compiled(so_args)

    def read(self, token_ids: list[int]) -> tuple[str, str, list[tuple[str, str]]]:
        """(reasoning, answer, calls with their arguments)."""
        return self.read_text([tokenizer().decode(token_ids)])

    def read_text(self, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
        parser = StreamParser(self.request.parsing)
        events = [event for piece in pieces for event in parser.push(piece)] + parser.finish("stop")
        names = [event.name for event in events if isinstance(event, ToolCallStart)]
        arguments = [""] * len(names)
        for event in events:
            if isinstance(event, ToolCallArguments):
                arguments[event.index] += event.text
        texts = ["".join(e.text for e in events if isinstance(e, kind)) for kind in (ReasoningText, AnswerText)]
        return texts[0], texts[1], list(zip(names, arguments, strict=True))

    def outputs(self, count: int = 30) -> list[tuple[str, str, list[tuple[str, str]]]]:
        assert self.grammar is not None
        walks = [walk(self.grammar, seed, hurry=0.5, first=("</", "<")) for seed in range(count)]
        return [self.read(token_ids) for token_ids in walks if token_ids is not None]

    def check(self, calls: list[tuple[str, str]]) -> None:
        for name, arguments in calls:
            schema = self.schemas[name] or {"type": "object"}
            judge = jsonschema.Draft202012Validator(schema)
            assert judge.is_valid(json.loads(arguments)), (name, arguments)


@pytest.mark.parametrize("version", ["v4.1", "v4"])
@pytest.mark.parametrize("thinking", [False, True])
def test_required_calls_satisfy_their_schemas(version: str, thinking: bool) -> None:
    tools = [tool("everything", EVERYTHING), tool("nothing", NOTHING), tool("any", None)]
    case = Case(thinking, version=version, tools=tools, tool_choice="required")
    found = case.outputs()
    assert len(found) >= 20
    for reasoning, answer, calls in found:
        assert calls and answer.strip() == "" and (thinking or not reasoning)
        case.check(calls)
    assert {name for _, _, calls in found for name, _ in calls} == {"everything", "nothing", "any"}
    assert any(len(calls) > 1 for _, _, calls in found)


def test_a_named_tool_is_the_one_that_is_called() -> None:
    tools = [tool("a", CLOSED), tool("b", CLOSED)]
    case = Case(tools=tools, tool_choice={"type": "function", "function": {"name": "b"}})
    assert {name for _, _, calls in case.outputs() for name, _ in calls} == {"b"}


def test_one_call_only() -> None:
    case = Case(parallel=False, tools=[tool("a", CLOSED)], tool_choice="required")
    assert [len(calls) for _, _, calls in case.outputs()] == [1] * len(case.outputs())
    auto = Case(parallel=False, tools=[tool("a", CLOSED)])
    assert all(len(calls) <= 1 for _, _, calls in auto.outputs())


def written(text: str) -> list[int]:
    """Tokens of an output in which control tokens are control tokens."""
    spelled = {tokenizer().bytes_of(i).decode(): i for i in tokenizer().control_ids.values()}
    out: list[int] = []
    while text:
        at = min((text.find(s) for s in spelled if s in text), default=len(text))
        out += tokenizer().encode_text(text[:at]) if at else []
        text = text[at:]
        control = next((s for s in spelled if text.startswith(s)), None)
        if control:
            out.append(spelled[control])
            text = text[len(control) :]
    return out


CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="a">\n<｜DSML｜ parameter name="a" string="true">{}</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


@pytest.mark.parametrize("value", ["", "x", "<p>a</p></div>", "two\nlines ü 日本", 'quote " and \\', "</", "</｜DSM"])
def test_strict_tools_leave_the_choice_and_any_text(value: str) -> None:
    case = Case(tools=[tool("a", CLOSED, True)])
    assert case.grammar is not None
    for before in ("", "Let me see.\n\n", "a < b </div>"):
        matcher = case.grammar.matcher()
        token_ids = written(before + CALL.format(value))
        assert feed(matcher, token_ids) and allowed(matcher) == {EOS}
        (call,) = case.read(token_ids)[2]
        assert json.loads(call[1]) == {"a": value}
    matcher = case.grammar.matcher()
    assert feed(matcher, tokenizer().encode_text("Just an answer.")) and EOS in allowed(matcher)


def test_no_call_is_spelled_in_text_and_none_opened_in_reasoning() -> None:
    case = Case(thinking=True, tools=[tool("a", CLOSED, True)])
    assert case.grammar is not None
    dsml, think_end = tokenizer().control_id("dsml"), tokenizer().control_id("think_end")
    matcher = case.grammar.matcher()
    assert feed(matcher, tokenizer().encode_text("Hm. <")) and dsml not in allowed(matcher)
    for text in ("<｜DSML｜ calls>", "</think>"):
        assert not feed(case.grammar.matcher(), tokenizer().encode_text(text))
    assert feed(matcher, [think_end]) and not feed(matcher, tokenizer().encode_text("<｜DSML｜ calls>"))
    bad = written("</think>" + CALL.format("x").replace('name="a" string', 'name="b" string'))
    assert not feed(case.grammar.matcher(), bad)


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "list": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        "map": {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1, "maxProperties": 2},
        "one": {"enum": ["</｜DSML｜ parameter>", "a\\"]},
        "free": {},
    },
    "required": ["list", "map", "one", "free"],
    "additionalProperties": False,
}
MARKS = [
    f"{slash}｜DSML｜{space}{tag}"
    for slash in ("</", "<")
    for space in ("", " ")
    for tag in ("", "parameter>", "invoke>")
]


def spelling_walk(grammar: Grammar, seed: int) -> list[int] | None:
    """A random output with marks in ordinary text wherever the grammar lets one in."""
    rng, matcher, out = random.Random(seed), grammar.matcher(), []
    closing = [
        EOS,
        tokenizer().control_id("dsml"),
        *(tokenizer().encode_text(t)[0] for t in ("</", "<", '"', "}", "]")),
    ]
    for _ in range(300):
        choices = allowed(matcher)
        wanted = [token_id for token_id in closing if token_id in choices]
        mark = tokenizer().encode_text(rng.choice(['\\"', "\\\\", "", ""]) + rng.choice(MARKS))
        if rng.random() < 0.5 and takes(matcher, mark):
            step = mark
        elif wanted and rng.random() < 0.7:
            step = [rng.choice(wanted[:3])]
        else:
            step = [rng.choice(sorted(choices))]
        if step == [EOS]:
            return out
        for token_id in step:
            matcher.accept(token_id)
        out += step
        assert matcher.failed is None
    return None


def takes(matcher: Matcher, token_ids: list[int]) -> bool:
    """Whether all of them may come now; nothing has changed."""
    rows = np.zeros((1 + len(token_ids), vocabulary().num_words), np.int32)
    matcher.fill_masks(token_ids, rows)
    return all(row[token_id >> 5] >> (token_id & 31) & 1 for token_id, row in zip(token_ids, rows, strict=False))


@pytest.mark.parametrize("version", ["v4.1", "v4"])
def test_marks_within_json_strings_are_text_at_every_chunking(version: str) -> None:
    """A grammar lets a JSON string hold what closes a parameter, spelled in ordinary tokens: it closes nothing."""
    case = Case(version=version, tools=[tool("a", NESTED)], tool_choice="required")
    assert case.grammar is not None
    rng = random.Random(7)
    num_outputs = num_marks = 0
    for seed in range(20):
        token_ids = spelling_walk(case.grammar, seed)
        if token_ids is None:
            continue
        text = tokenizer().decode(token_ids)
        whole = case.read_text([text])
        case.check(whole[2])
        num_outputs += 1
        num_marks += sum(arguments.count("</｜DSML｜") for _, arguments in whole[2])
        assert case.read_text(list(text)) == whole
        for cut in range(1, len(text)) if len(text) < 600 else rng.sample(range(1, len(text)), 60):
            assert case.read_text([text[:cut], text[cut:]]) == whole
    assert num_outputs >= 10 and num_marks > 30


def test_a_value_that_leaves_a_string_open_ends_with_its_tag() -> None:
    """Nothing is enforced here: the model slips, and the next parameter is read all the same."""
    case = Case(tools=[tool("a", CLOSED)])
    for end in ("</｜DSML｜ parameter>\n", "</｜DSML｜parameter>\n"):
        text = CALL.format("x").replace(
            "</｜DSML｜ parameter>\n", end + '<｜DSML｜ parameter name="b" string="true">y' + end
        )
        text = "\n\n" + text.replace('"true">x', '"false">["5 inch')
        for pieces in ([text], list(text)):
            assert case.read_text(pieces)[2] == [("a", '{"a": ["5 inch, "b": "y"}')]


def test_answers_with_a_format_and_tools() -> None:
    case = Case(tools=[tool("a", CLOSED, True)], response_format={"type": "json_object"})
    num_calls = 0
    for _, answer, calls in case.outputs(40):
        num_calls += len(calls)
        case.check(calls)
        assert calls or isinstance(json.loads(answer), dict)
    assert num_calls


def test_nothing_is_enforced_that_nobody_asked_for() -> None:
    assert Case(tools=[tool("a", CLOSED)]).grammar is None
    assert Case(tools=[tool("a", CLOSED)], tool_choice="none").grammar is None


def test_strict_schemas_are_enforced_whole() -> None:
    """Strict mode's normal form drops `minItems`; the calls obey it all the same, and stay closed."""
    inner = {"type": "object", "properties": {"l": {"type": "array", "items": {"type": "null"}, "minItems": 3}}}
    case = Case(tools=[tool("a", inner | {"required": ["l"]}, True)])
    enforced = case.request.conversation.tools[0].enforced
    assert enforced["additionalProperties"] is False and enforced["properties"]["l"]["minItems"] == 3
    shown = case.request.conversation.tools[0].parameters
    assert "minItems" not in json.dumps(shown)


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "minProperties": 1},
        {"type": "object", "properties": {'a"b': {}}},
        {"type": "object", "patternProperties": {"a": {}}},
        {"type": "object", "properties": {"a": {"$ref": "#/nope"}}},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
    ],
)
def test_parameters_that_cannot_be_enforced_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Case(tools=[tool("a", parameters)], tool_choice="required")


def test_references_that_go_in_circles_or_double_are_followed_once() -> None:
    """Alternatives that refer to themselves say nothing new; 2 ** 40 ways to the same string are one."""
    definitions: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)
    }
    leaf = [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 7, "maximum": 7}]
    definitions["d40"] = {"anyOf": [{"$ref": "#/$defs/d0"}, *leaf]}
    schema = {**CLOSED, "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}
    case = Case(tools=[tool("a", schema, True)])
    assert case.grammar is not None

    def is_allowed(text: str, is_string: bool) -> bool:
        assert case.grammar is not None
        call = CALL.format(text)
        return feed(case.grammar.matcher(), written(call if is_string else call.replace('"true"', '"false"')))

    assert is_allowed("abc", True) and is_allowed("7", False)
    assert not is_allowed("abcd", True) and not is_allowed("8", False)
    circle = {"anyOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/c"}]}
    with pytest.raises(ValueError, match="circle"):
        nothing = {**CLOSED, "properties": {"a": {"$ref": "#/$defs/c"}}, "$defs": {"c": circle}}
        Case(tools=[tool("a", nothing)], tool_choice="required")


def test_a_reference_in_a_value_is_text() -> None:
    """Only schemas have references: enum, const, default and examples hold values, and a property may be named $ref."""
    value = {"$ref": "#/$defs/n", "items": {"$ref": "#"}}
    properties = {
        "a": {"anyOf": [{"const": value}, {"$ref": "#/$defs/n"}], "default": value, "examples": [value]},
        "b": {"type": "array", "items": {"enum": [value, "#"]}, "minItems": 1, "maxItems": 1},
        "c": {"type": "object", "properties": {"$ref": {"$ref": "#/$defs/n"}}, "required": ["$ref"],
              "additionalProperties": False},
    }  # fmt: skip
    schema = {"type": "object", "properties": properties, "required": ["a", "b", "c"], "additionalProperties": False}
    case = Case(tools=[tool("a", schema | {"$defs": {"n": {"type": "null"}}})], tool_choice="required")
    seen = set()
    for _, _, calls in case.outputs(12):
        case.check(calls)
        for _, arguments in calls:
            assert json.loads(arguments)["c"] == {"$ref": None}
            seen.add(json.dumps(json.loads(arguments)["a"]))
    assert seen == {json.dumps(value), "null"}


def test_references_into_lists_and_with_escapes_are_followed() -> None:
    schema = CLOSED | {"properties": {"a": {"$ref": "#/$defs/x%20%7E1/anyOf/1"}},
                       "$defs": {"x /": {"anyOf": [{"type": "null"}, {"enum": ["y"]}]}}}  # fmt: skip
    case = Case(tools=[tool("a", schema)], tool_choice="required")
    assert {arguments for _, _, calls in case.outputs(3) for _, arguments in calls} == {'{"a": "y"}'}


LABELS = {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2}


def test_hundreds_of_strict_tools_are_a_small_grammar() -> None:
    """Equal parts of tools share a rule; what 200 tools have in common is compiled once."""
    parameters = {"type": "object", "additionalProperties": False, "properties": {
        "query": {"type": "string"}, "limit": {"type": ["integer", "null"]},
        "mode": {"type": "string", "enum": ["fast", "slow"]},
        "options": {"type": "object", "properties": {"deep": {"type": "boolean"}, "tags": LABELS},
                    "additionalProperties": False},
    }}  # fmt: skip
    own = [
        {**parameters, "properties": {**parameters["properties"], f"p{i}": {"type": "integer", "minimum": i}}}
        for i in range(200)
    ]
    start = time.process_time()
    case = Case(tools=[tool(f"t{i}", schema, True) for i, schema in enumerate(own)], tool_choice="required")
    assert case.grammar is not None and time.process_time() - start < 5
    names = set()
    for _, _, calls in case.outputs(10):
        case.check(calls)
        names |= {name for name, _ in calls}
    assert len(names) > 3


def test_a_schema_is_not_copied_into_thousands_of_parts() -> None:
    part = {"type": "array", "items": {"$ref": "#/$defs/d"}}
    schema = {"type": "object", "properties": {f"p{i}": part for i in range(1000)}, "$defs": {"d": {"type": "null"}}}
    with pytest.raises(ValueError, match="too many of its parts"):
        Case(tools=[tool("a", schema)], tool_choice="required")


@pytest.mark.parametrize("calls", [False, True])
def test_marks_within_an_answer_of_a_format_are_text(calls: bool) -> None:
    """`</think>` and the mark of a tool block, in ordinary tokens of a string; a real block is one all the same."""
    options = ParsingOptions(parse_tool_calls=calls, answer_has_format=True, thinking_initial_stage="ReasoningStart")
    block = "\n\n" + CALL.format("x")
    for answer in ('{"a": "</think><｜DSML｜ calls>\\n", "b": "<｜DSML｜"}', '"</think>"', "<｜DSL", *[block] * calls):
        text = "Hm.\n</think>" + answer
        for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
            parser = StreamParser(options)
            events = [event for piece in pieces for event in parser.push(piece)] + parser.finish("stop")
            shown = "".join(event.text for event in events if isinstance(event, AnswerText))
            assert (shown, parser.called_tools) == (("", True) if answer == block else (answer, False))
