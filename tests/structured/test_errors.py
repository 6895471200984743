"""What cannot be right, or is too much, is refused before an output begins, and in words that can be sent."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from deepinfer.structured.constraint import Constraint
from deepinfer.structured.lark import MAX_CHOICES
from deepinfer.structured.sandbox import Sandbox
from tests.structured.grammars import EOS, NANO, REPEATED, VOCAB_SIZE, accepts, compiled, tag

CHOICES = ["".join(letters) for letters in itertools.product("abcdefghijklmnopqrst", repeat=4)][::8]


@pytest.mark.parametrize(
    ("kind", "schema", "where"),
    [
        ("json", r'{"const": "\ud800"}', "#/const"),
        ("json", r'{"properties": {"a/b": {"enum": [1, "\uDC00\ud800"]}}}', "#/properties/a~1b/enum/1"),
        ("json", r'{"properties": {"\ud800": {"nope": 1}}}', "a name in #/properties holds a lone surrogate"),
        ("json", r'{"description": "\udfff"}', "#/description"),
        ("structural_tag", r'{"type": "structural_tag", "format": {"type": "const_string", "value": "\udc00"}}',
         "#/format/value"),
        ("structural_tag", r'{"type": "structural_tag", "format": {"\ud800": 1}}', "a name in #/format"),
        ("choice", r'["a", "\ud83d"]', "#/1"),
    ],
)  # fmt: skip
def test_lone_surrogates_are_found_behind_escapes(kind: str, schema: str, where: str) -> None:
    with pytest.raises(ValueError, match="^so_args.schema must be Unicode") as caught:
        compiled({"schema_type": kind, "schema": schema})
    assert where in str(caught.value) and str(caught.value).encode()


def test_pairs_of_surrogates_are_characters() -> None:
    assert accepts(compiled({"schema_type": "json", "schema": r'{"const": "\ud83d\ude00"}'}), '"\U0001f600"')


def test_values_that_json_does_not_have() -> None:
    itself: dict[str, Any] = {}
    itself["properties"] = itself
    for kind, schema in (("json", {"enum": {1}}), ("json", itself), ("structural_tag", itself), ("choice", [{1}])):
        with pytest.raises(ValueError, match="^so_args.schema must hold values that JSON has, and not itself"):
            Constraint.from_so_args({"schema_type": kind, "schema": schema})


def test_choices_have_a_limit_within_which_they_work() -> None:
    most = CHOICES[:MAX_CHOICES]
    assert len(most) == MAX_CHOICES
    grammar = compiled({"schema_type": "choice", "schema": most + most[:100]})  # equal ones count once
    assert all(accepts(grammar, text) for text in (most[0], most[-1])) and not accepts(grammar, "zzzz")
    with pytest.raises(ValueError, match=f"at most {MAX_CHOICES} choices, got {len(CHOICES)}"):
        compiled({"schema_type": "choice", "schema": CHOICES})


def test_what_no_token_can_be_accepted_of_is_too_complex() -> None:
    choices = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in CHOICES]}
    for node in (REPEATED, choices):
        with pytest.raises(ValueError, match="^so_args.schema is too complex"):
            compiled(tag(node))


def test_a_sandbox_walks_into_what_is_too_complex_further_on() -> None:
    sandbox = Sandbox(NANO, VOCAB_SIZE, (EOS,), "llguidance", 20.0)
    node = {"type": "sequence", "elements": [{"type": "regex", "pattern": "[0-9]{3}"}, REPEATED]}
    with pytest.raises(ValueError, match="^so_args.schema is too complex"):
        sandbox.write(Constraint.from_so_args(tag(node)))
    assert json.loads(sandbox.write(Constraint("choice", '["a"]')).split("start: ")[1]) == "a"
    sandbox._end(sandbox._process())
