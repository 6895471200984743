"""so_args: what SamplingParams accepts, and how it names what it refuses."""

from __future__ import annotations

import pytest

from deepinfer.params import SamplingParams
from deepinfer.structured.constraint import MAX_SCHEMA_BYTES, Constraint


def test_every_field_comes_back() -> None:
    given = {"schema_type": "regex", "schema": "a+", "trigger_token_ids": [5, 6], "bound_token_id": 7}
    constraint = Constraint.from_so_args(given)
    assert constraint == Constraint("regex", "a+", (5, 6), 7)
    assert constraint.so_args() == given


def test_schemas_may_be_given_as_values() -> None:
    assert SamplingParams(so_args={"schema_type": "json", "schema": {"type": "null"}}).so_args == {
        "schema_type": "json", "schema": '{"type": "null"}',
    }  # fmt: skip
    assert Constraint.from_so_args({"schema_type": "choice", "schema": ("a", "b")}).schema == '["a", "b"]'
    assert Constraint.from_so_args({"schema_type": "json", "schema": True}).schema == "true"
    assert Constraint.from_so_args({"schema_type": "json_object"}).schema == ""


@pytest.mark.parametrize(
    ("so_args", "named"),
    [
        ("regex", "so_args must be a mapping"),
        ({}, "so_args.schema_type must be one of regex, json, ebnf, json_object, choice, structural_tag"),
        ({"schema_type": "xml", "schema": "a"}, "so_args.schema_type"),
        ({"schema_type": ["regex"], "schema": "a"}, "so_args.schema_type"),
        ({"schema_type": "regex"}, "so_args.schema must be a non-empty string"),
        ({"schema_type": "regex", "schema": ""}, "so_args.schema"),
        ({"schema_type": "regex", "schema": 5}, "so_args.schema"),
        ({"schema_type": "regex", "schema": "\ud800"}, "lone surrogate"),
        ({"schema_type": "regex", "schema": "a" * (MAX_SCHEMA_BYTES + 1)}, f"at most {MAX_SCHEMA_BYTES} bytes"),
        ({"schema_type": "json_object", "schema": "{}"}, "json_object"),
        ({"schema_type": "regex", "schema": "a", "start": 1}, "'start'"),
        ({"schema_type": "regex", "schema": "a", "trigger_token_ids": 5}, "so_args.trigger_token_ids"),
        ({"schema_type": "regex", "schema": "a", "trigger_token_ids": [-1]}, "so_args.trigger_token_ids"),
        ({"schema_type": "regex", "schema": "a", "trigger_token_ids": [True]}, "so_args.trigger_token_ids"),
        ({"schema_type": "regex", "schema": "a", "trigger_token_ids": list(range(65))}, "at most 64"),
        ({"schema_type": "regex", "schema": "a", "bound_token_id": 4}, "needs trigger_token_ids"),
        ({"schema_type": "regex", "schema": "a", "trigger_token_ids": [4], "bound_token_id": "x"}, "bound_token_id"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_wrong_is_named(so_args: object, named: str) -> None:
    with pytest.raises(ValueError, match="^so_args") as caught:
        SamplingParams(so_args=so_args)  # type: ignore[arg-type]
    assert named in str(caught.value)


def test_contradictions_are_refused() -> None:
    so_args = {"schema_type": "regex", "schema": "a"}
    with pytest.raises(ValueError, match="golden_token_ids cannot be combined with so_args"):
        SamplingParams(so_args=so_args, golden_token_ids=[1])
    with pytest.raises(ValueError, match="ignore_eos cannot be combined with so_args"):
        SamplingParams(so_args=so_args, ignore_eos=True)
    with pytest.raises(ValueError, match=r"so_args.trigger_token_ids: token id 9 is outside the vocabulary \[0, 9\)"):
        SamplingParams(so_args=so_args | {"trigger_token_ids": [9]}).check_vocabulary(9)
