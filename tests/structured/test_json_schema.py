"""JSON Schemas: what is accepted is enforced whole, what is not is refused by name. `jsonschema` is the judge."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.structured.endless import All, Ending, Some, endless
from deepinfer.structured.json_schema import FORMATS, bounded, check_schema
from tests.structured.grammars import accepts, as_written, compiled, generated_schema, tokenizer, vocabulary, walk

SUITE = [json.loads(line) for line in (Path(__file__).parent / "json_schema_test_suite/schemas.jsonl").open()]
VALIDATORS = {"draft2020-12": jsonschema.Draft202012Validator, "draft7": jsonschema.Draft7Validator}


def validator(schema: Any, draft: str = "draft2020-12") -> Any:
    return VALIDATORS[draft](schema, format_checker=VALIDATORS[draft].FORMAT_CHECKER)


def compiled_json(schema: Any) -> Any:
    return compiled({"schema_type": "json", "schema": json.dumps(schema)})


def keywords_of(schema: Any) -> set[str]:
    """Every key anywhere in the schema."""
    if isinstance(schema, dict):
        return {*schema, *(key for value in schema.values() for key in keywords_of(value))}
    return {key for value in schema for key in keywords_of(value)} if isinstance(schema, list) else set()


@pytest.mark.parametrize("group", range(8))
def test_suite_outputs_validate_and_what_is_refused_is_named(group: int) -> None:
    """Every schema of the JSON Schema Test Suite: random outputs are valid, and no invalid instance is accepted."""
    num_compiled = num_outputs = 0
    for case in SUITE[group::8]:
        schema = case["schema"]
        try:
            grammar = compiled_json(schema)
        except ValueError as error:
            assert str(error).startswith("so_args.schema"), case
            continue
        num_compiled += 1
        judge = validator(schema, case["draft"])
        knows_patterns = "\\p{" not in json.dumps(schema)  # Python's re, which the judge uses, has no such classes
        for seed in range(6 * knows_patterns):
            token_ids = walk(grammar, seed)
            if token_ids is not None:
                num_outputs += 1
                text = tokenizer().decode(token_ids)
                assert judge.is_valid(json.loads(text)), (case["file"], schema, text)
        for instance, is_valid in case["tests"] * knows_patterns:
            assert is_valid or not judge.is_valid(instance) or case["file"].startswith("optional")
            if not judge.is_valid(instance):
                assert not accepts(grammar, as_written(instance)), (case["file"], schema, instance)
    assert num_compiled >= 15 and num_outputs >= 5 * num_compiled


@pytest.mark.parametrize("group", range(4))
def test_generated_schemas(group: int) -> None:
    """200 random schemas: outputs validate."""
    num_outputs = num_refused = 0
    for number in range(group * 50, group * 50 + 50):
        schema = generated_schema(random.Random(number))
        try:
            grammar = compiled_json(schema)
        except ValueError as error:
            assert "no output satisfies" in str(error) or "nsatisfiable" in str(error), (schema, error)
            num_refused += 1
            continue
        judge = validator(schema)
        for seed in range(4):
            token_ids = walk(grammar, seed)
            if token_ids is not None:
                num_outputs += 1
                text = tokenizer().decode(token_ids)
                assert judge.is_valid(json.loads(text)), (schema, text)
    assert num_refused <= 5 and num_outputs >= 120


def test_values_written_as_usual_are_accepted() -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"}, "age": {"type": "integer"}, "size": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "required": ["name"],
        "additionalProperties": False,
    }  # fmt: skip
    grammar = compiled_json(schema)
    for value in ({"name": ""}, {"name": "ü\n\"x\" 日本 \\", "age": -9007199254740993, "size": 0.000125}, {
        "name": "a", "age": 0, "size": 12345678.25, "tags": ["a", "b"], "next": {"name": "b", "next": None},
    }):  # fmt: skip
        assert accepts(grammar, as_written(value)), value
    assert not accepts(grammar, as_written({"name": "a", "more": 1}))
    assert not accepts(grammar, as_written({"age": 1}))


REFUSED: list[tuple[Any, str, str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems", "#/uniqueItems"),
    ({"not": {}}, "not", "#/not"),
    ({"properties": {"a": {"if": {}}}}, "if", "#/properties/a/if"),
    ({"items": {"contains": {}}}, "contains", "#/items/contains"),
    ({"propertyNames": {}}, "propertyNames", "#/propertyNames"),
    ({"dependentRequired": {}}, "dependentRequired", "#/dependentRequired"),
    ({"$defs": {"a/b": {"dependentSchemas": {}}}}, "dependentSchemas", "#/$defs/a~1b/dependentSchemas"),
    ({"anyOf": [{}, {"unevaluatedProperties": False}]}, "unevaluatedProperties", "#/anyOf/1/unevaluatedProperties"),
    ({"$dynamicRef": "#a"}, "$dynamicRef", "#/$dynamicRef"),
    ({"properties": {"a": {"$id": "x"}}}, "$id", "#/properties/a/$id"),
    ({"minlength": 3}, "minlength", "#/minlength"),
    ({"x-guidance": {"lenient": True}}, "x-guidance", "#/x-guidance"),
    ({"type": "string", "contentEncoding": "base64"}, "contentEncoding", "#/contentEncoding"),
    ({"type": "string", "format": "regex"}, "format", "#/format"),
    ({"$ref": "https://example.com/a"}, "$ref", "#/$ref"),
    ({"$ref": "#/nope"}, "nope", "so_args.schema"),
    ({"properties": {"a": {"$ref": "#/properties/b/const"}, "b": {"const": {"format": "regex"}}}},
     "#/properties/b/const", "#/properties/a/$ref"),
    ({"maximum": "3"}, "maximum", "#/maximum"),
    ({"exclusiveMaximum": True, "maximum": 3}, "exclusiveMaximum", "#/exclusiveMaximum"),
    ({"type": "nothing"}, "type", "#/type"),
    ({"enum": []}, "enum", "#/enum"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf", "so_args.schema"),
    ({"type": "string", "pattern": "a(?=b)"}, "a(?=b)", "so_args.schema"),
    ({"properties": {"a": {"pattern": "a++b"}}}, "++ is not supported in 'a++b'", ""),
    ({"pattern": "(a|b){1,2}+b"}, "{1,2}+ is not supported", ""),
    ({"$ref": "#/$defs/deepinfer.any", "$defs": {"deepinfer.any": {"type": "null"}}}, "#/$defs/deepinfer.any", ""),
    (False, "false", "so_args.schema"),
    ({"$ref": "#"}, "no finite value satisfies #", "so_args.schema"),
    ({"required": ["a"], "type": "object", "properties": {"a": {"$ref": "#"}}}, "no finite value satisfies #:", ""),
    ({"properties": {"a": {"$ref": "#/$defs/l"}}, "$defs": {"l": {"type": "array", "minItems": 1, "items": {
        "anyOf": [{"$ref": "#/$defs/l"}, {"allOf": [{"$ref": "#/$defs/l"}]}]}}}}, "no finite value satisfies #/", ""),
    ({"type": ["array", "object"], "required": ["x"], "additionalProperties": {"$ref": "#"},
      "prefixItems": [{"$ref": "#"}], "minItems": 1}, "no finite value satisfies #:", ""),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "", "so_args.schema"),
    ({"const": 2**53 + 1}, "9007199254740993", "#/const"),
    ({"enum": ["a", {"a/b": [-(2**53)]}]}, "-9007199254740992", "#/enum/1/a~1b/0"),
    ({"properties": {"n": {"type": "integer", "maximum": 2**63 - 1}}}, "9223372036854775807", "#/properties/n/maximum"),
    ({"exclusiveMinimum": -(10**400)}, "an integer of 1329 bits", "#/exclusiveMinimum"),
    ({"multipleOf": 1e17}, "1e+17", "#/multipleOf"),
    ({"const": 123456789.123456789}, "123456789.12345679", "#/const"),
    ({"type": "object", "minProperties": 3, "maxProperties": 3, "patternProperties": {"^x$": {"type": "boolean"}},
      "additionalProperties": False}, "must be at most 1 here", "#/minProperties"),
    ({"required": ["a", "a"], "minProperties": 3}, "must be at most 2 here", "#/minProperties"),
    ({"pattern": "[a-z&&[^b]]"}, "the operation && on classes", ""),
    ({"patternProperties": {"[[:alpha:]]": {}}}, "a class within a class", "'[[:alpha:]]'"),
    ("", "object or a boolean", "#"),
    ([], "object or a boolean", "#"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["Größe", "a%b", 'a~0b c"[<', "ü~1x"])
def test_references_may_have_any_name(name: str) -> None:
    plain = name.replace("~1", "/").replace("~0", "~")
    for reference in (name.replace("%", "%25"), quote(name, safe="")):
        grammar = compiled_json({"$ref": f"#/$defs/{reference}", "$defs": {plain: {"const": [1]}}})
        assert accepts(grammar, "[1]") and not accepts(grammar, "[2]")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}}}, None),
        ({"required": ["a"], "type": "object", "properties": {
            "x": {"type": "string", "minLength": 3, "maxLength": 2},
            "a": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/n"}}},
          "$defs": {"n": {"type": "integer", "minimum": 1.2, "maximum": 1.8}}}, "#/properties/a/items: Unsatisfiable"),
        ({"items": {"properties": {"p": {"pattern": "a(?=b)"}}}}, "#/items/properties/p: not a regular expression"),
        ({"properties": {"a": {}, "b": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}}}, "#/properties/b: oneOf"),
        ({"anyOf": [{"allOf": [{"type": "string"}, {"type": "null"}]}]}, "#/anyOf/0: Unsatisfiable"),
    ],
)  # fmt: skip
def test_faults_that_the_library_finds_have_a_place(schema: Any, message: str | None) -> None:
    """None: a property that may be left out, and is."""
    grammars = GrammarCompiler(vocabulary)
    future = grammars.compile({"schema_type": "json", "schema": json.dumps(schema)})
    if message is None:
        assert future.result(30)
    else:
        with pytest.raises(ValueError, match=f"^so_args.schema: {re.escape(message)}"):
            future.result(30)
    grammars.close()


FINITE: list[tuple[Any, Any]] = [
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}, {"a": {"a": {}}}),
    ({"type": "array", "items": {"$ref": "#"}}, [[], [[]]]),
    ({"type": "array", "minItems": 1, "items": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, [[None], None]),
    ({"type": ["array", "null"], "minItems": 1, "items": {"$ref": "#"}}, [None, [None]]),
    ({"type": "object", "required": ["a"], "properties": {"a": {"enum": [1, {}]}}}, {"a": {}}),
]


@pytest.mark.parametrize(("schema", "value"), FINITE, ids=lambda value: str(value)[:40])
def test_recursion_that_ends_is_no_fault(schema: Any, value: Any) -> None:
    assert accepts(compiled_json(schema), as_written(value))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_rules_that_never_end_against_the_definition(seed: int, size: int) -> None:
    rng = random.Random(seed)

    def rule(depth: int) -> Ending:
        kind = rng.choice(["rule", "rule", "all", "some"]) if depth else "rule"
        if kind == "rule":
            return str(rng.randrange(size))
        parts = tuple(rule(depth - 1) for _ in range(rng.randint(0, 3)))
        return All(parts) if kind == "all" else Some(parts)

    def ends(node: Ending, known: set[str]) -> bool:
        if isinstance(node, str):
            return node in known
        return (all if isinstance(node, All) else any)([ends(part, known) for part in node.parts])

    rules = {str(number): rule(2) for number in range(size)}
    known: set[str] = set()
    for _ in rules:  # texts of at most so many rules within each other
        known = {name for name, node in rules.items() if ends(node, known)}
    assert endless(rules) == [name for name in rules if name not in known]


@pytest.mark.parametrize(("schema", "keyword", "where"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_enforced_is_refused_by_keyword_and_place(schema: Any, keyword: str, where: str) -> None:
    with pytest.raises(ValueError, match="^so_args.schema") as caught:
        compiled_json(schema)
    assert keyword in str(caught.value) and where in str(caught.value)


def test_no_json_and_too_deep() -> None:
    for text in ("{", "NaN", "[" * 5000, '{"type": "string", "minLength": 1e999}'):
        with pytest.raises(ValueError, match="^so_args.schema"):
            compiled({"schema_type": "json", "schema": text})
    deep: Any = {}
    for _ in range(80):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        check_schema(deep)


@pytest.mark.parametrize("kind", [{"type": "integer"}, {"type": "number"}, {}, {"minimum": 7}, {"maximum": -1e14}])
def test_numbers_end(kind: dict[str, Any]) -> None:
    """A model that would write digits for ever has to stop (known from unbounded `{}` schemas elsewhere)."""
    grammar = compiled_json(kind)
    for prefix in ("9", "-9", "1.", "7"):
        text = prefix
        while len(text) < 80 and accepts_start(grammar, text):
            text += "9"
        assert len(text) < 60, text


def accepts_start(grammar: Any, text: str) -> bool:
    from tests.structured.grammars import feed

    return feed(grammar.matcher(), [token for char in text for token in tokenizer().encode_text(char)])


def test_bounds_change_nothing_else() -> None:
    """Values of the bounded schema are values of the schema; it bounds only what has no bounds."""
    given = {"type": "integer", "minimum": 10**20}
    assert "maximum" not in bounded(given)
    assert bounded({"type": "number", "minimum": 0, "maximum": 1e-8})["maximum"] == 1e-8
    assert bounded({"enum": [10**30]})["enum"] == [10**30]
    assert accepts(compiled_json({"type": "number", "minimum": 0.25, "maximum": 0.5}), "0.375")


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.integers(1 - 2**53, 2**53 - 1),
        st.builds(
            lambda digits, places: float(f"{digits}e-{places}"), st.integers(-(10**15), 10**15), st.integers(1, 22)
        ),
    )
)
def test_numbers_are_written_as_they_are(number: float) -> None:
    (text,) = {tokenizer().decode(walk(compiled_json({"const": number}), 1) or [])}
    assert json.loads(text) == number
    if isinstance(number, int):
        only = compiled_json({"type": "integer", "minimum": number, "maximum": number})
        assert tokenizer().decode(walk(only, 1) or []) == str(number)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3), st.integers(0, 5), st.booleans(), st.integers(0, 10**6))
def test_objects_have_as_many_members_as_they_must(required: int, least: int, is_open: bool, seed: int) -> None:
    """A key that comes again counts once."""
    schema = {
        "type": "object", "required": list("abc"[:required]), "minProperties": least,
        "patternProperties": {"^[xy]$": {"type": "null"}}, "additionalProperties": is_open and {"type": "null"},
    }  # fmt: skip
    try:
        grammar = compiled_json(schema)
    except ValueError as error:
        assert least > required + 1 or (required and not is_open), error
        return
    token_ids = walk(grammar, seed, hurry=0.8)
    assert token_ids is None or validator(schema).is_valid(json.loads(tokenizer().decode(token_ids)))


@pytest.mark.parametrize("name", FORMATS)
def test_formats_hold(name: str) -> None:
    grammar = compiled_json({"type": "string", "format": name})
    judge = validator({"type": "string", "format": name})
    for seed in range(30):
        token_ids = walk(grammar, seed, hurry=0.2)
        if token_ids is not None:
            value = json.loads(tokenizer().decode(token_ids))
            assert judge.is_valid(value), value


def test_vllm_38696_whitespace_is_bounded() -> None:
    """Between JSON tokens there is one way to write a separator; inside strings anything goes."""
    schema = {"type": "object", "properties": {"questionType": {"enum": ["a b"]}}, "required": ["questionType"]}
    grammar = compiled_json(schema | {"additionalProperties": False})
    assert accepts(grammar, '{"questionType": "a b"}')
    for text in ('{\n"questionType": "a b"}', '{"questionType":  "a b"}', '{"questionType": "a b"} '):
        assert not accepts(grammar, text)
    assert accepts(compiled_json({"type": "string"}), '"   \\n   \\t"')


def test_formats_that_are_types_of_numbers_or_hints() -> None:
    small = compiled_json({"type": "integer", "format": "int32", "minimum": 0})
    assert accepts(small, "0") and accepts(small, "2147483647")
    assert not accepts(small, "2147483648") and not accepts(small, "-1")
    assert accepts(compiled_json({"type": "integer", "format": "int32"}), "-2147483648")
    assert accepts(compiled_json({"type": "integer", "format": "int64"}), "-9007199254740991")
    for name in ("password", "binary", "path"):
        assert accepts(compiled_json({"type": "string", "format": name}), '"/x y\\n"')


@pytest.mark.parametrize(
    ("name", "text"),
    [("time", "07:15:55.4666666666666666Z"), ("date-time", "2020-01-01T07:15:55.46666666666666666666Z"),
     ("duration", "P" + "4" * 40 + "D")],
)  # fmt: skip
def test_digits_of_times_do_not_go_on_for_ever(name: str, text: str) -> None:
    grammar = compiled_json({"type": "string", "format": name})
    assert not accepts(grammar, json.dumps(text)) and accepts(grammar, json.dumps(re.sub("6{4,}|4{20,}", "6", text)))
