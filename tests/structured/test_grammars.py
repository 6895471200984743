"""Regular expressions, EBNF, choices and structural tags; control tokens; both libraries agree."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from deepinfer.structured.regex import portable_pattern, without_anchors
from tests.structured.grammars import EOS, accepts, allowed, compiled, feed, tokenizer, walk

SEED_CASES = [
    ("regex", r"[A-Z]{2}-[0-9]{3}", r"[A-Z]{2}-[0-9]{3}"),
    ("ebnf", 'root ::= "answer=" ("yes" | "no") ";level=" [1-3]', r"answer=(yes|no);level=[1-3]"),
    ("ebnf", 'root ::= item ("," item)*\nitem ::= [a-c]+ # a comment', r"[a-c]+(,[a-c]+)*"),
    ("choice", '["red", "green \\"1\\""]', r'red|green "1"'),
    ("regex", r"^\d{2}\w\s$", r"[0-9]{2}[0-9A-Za-z_][ \t\n\r\f\v]"),
    ("regex", r"[^\W\d]{3}", r"[^\W\d]{3}"),
    ("regex", r"[^\w\s]{2}", r"[^\w\s]{2}"),
    ("regex", "a/b|c", "a/b|c"),
    ("regex", ".{3}", ".{3}"),
]


@pytest.mark.parametrize(("kind", "schema", "pattern"), SEED_CASES)
def test_outputs_match(kind: str, schema: str, pattern: str) -> None:
    grammar = compiled({"schema_type": kind, "schema": schema})
    texts = [tokenizer().decode(out) for out in (walk(grammar, seed) for seed in range(25)) if out is not None]
    assert len(texts) >= 20 and len(set(texts)) > 1
    for text in texts:
        assert re.fullmatch(pattern, text), text


def test_recursive_ebnf() -> None:
    grammar = compiled({"schema_type": "ebnf", "schema": 'root ::= "a" root "b" | "c"'})
    assert accepts(grammar, "aaacbbb") and not accepts(grammar, "aacb") and not accepts(grammar, "ab")


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        ("regex", "("), ("regex", "[a"), ("regex", "a(?=b)"), ("regex", r"(a)\1"), ("regex", "a{5,2}"),
        ("ebnf", "root ::= nope"), ("ebnf", 'root := "a"'), ("ebnf", ""), ("ebnf", 'start ::= "a"'),
        ("ebnf", 'root ::= root "a"'), ("ebnf", "root ::= ["), ("choice", "red"), ("choice", "[]"), ("choice", "[1]"),
        ("structural_tag", "{}"), ("structural_tag", '{"type": "structural_tag", "format": {"type": "xml"}}'),
    ],
)  # fmt: skip
def test_malformed_grammars_are_refused(kind: str, schema: str) -> None:
    with pytest.raises(ValueError, match="^so_args.schema"):
        compiled({"schema_type": kind, "schema": schema})


def test_patterns_mean_what_every_dialect_means() -> None:
    assert portable_pattern(r"\d[\s\w]\.") == r"[0-9][ \t\n\r\f\v0-9A-Za-z_]\."
    assert portable_pattern("[.]a") == "[.]a" and "2028" in portable_pattern("a.c")
    assert (
        without_anchors("^abc$") == "abc" and without_anchors(r"a\$") == r"a\$" and without_anchors("^a|b$") == "^a|b$"
    )
    assert without_anchors("^(a|b)$") == "(a|b)" and without_anchors("^[|]$") == "[|]"


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("[a[b]]", "a class within a class"), ("[[:alpha:]]", "a class within a class"), ("[]a]", "begins with ]"),
        ("[a-z&&b]", "operation &&"), ("[+--]", "operation --"), ("[a~~b]", "operation ~~"), ("(?R)a", "flags (?R)"),
        ("(?U:a*)", "flags (?U:"), ("(?ix)a b", "flags (?ix)"), (r"a\z", r"\z"), (r"\Aa", r"\A"),
        (r"\x{61}", r"\x{...}"), (r"\b{start}a", r"\b{"), ("a{,3}", "quantifier {,3} (which is {0,3})"),
    ],
)  # fmt: skip
def test_what_means_something_else_in_another_dialect_is_refused(pattern: str, what: str) -> None:
    with pytest.raises(ValueError, match="^so_args.schema") as caught:
        compiled({"schema_type": "regex", "schema": pattern})
    assert what in str(caught.value) and "is not supported" in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"[\[a]{2}", "[a"), ("a--b&&c", "a--b&&c"), ("(?i)ab", "aB"), ("(?i:a)b", "Ab"), (r"\x61\u0062", "ab"),
     (r"\<a\>", "<a>"), ("[a&-]{3}", "&-a"), (r"\\z", "\\z"), ("[(?x)]", "?"), ("(?:a|b)(?P<n>c)", "bc")],
)  # fmt: skip
def test_what_means_the_same_everywhere_is_kept(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text) and accepts(compiled({"schema_type": "regex", "schema": pattern}), text)


@pytest.mark.parametrize("text", ["\0\x01\x7f", "\x85\x1b\n\b", '\n\r\t"\\/é\xa0\u3000\u2028'])
def test_fixed_text_may_hold_any_character(text: str) -> None:
    assert accepts(compiled({"schema_type": "choice", "schema": [text, "b"]}), text)
    free = {"type": "any_text", "excludes": ["<"]}
    grammar = compiled(tag({"type": "sequence", "elements": [free, const(text + "<"), const(text)]}))
    assert accepts(grammar, f"ab{text}<{text}") and not accepts(grammar, f"ab<{text}")


NULL = {"type": "json_schema", "json_schema": {"type": "null"}}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}


def tag(node: dict[str, Any]) -> dict[str, Any]:
    return {"schema_type": "structural_tag", "schema": json.dumps({"type": "structural_tag", "format": node})}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def test_parts_of_structural_tags() -> None:
    number = {"type": "regex", "pattern": "[0-9]+"}
    grammar = compiled(
        tag({"type": "sequence", "elements": [
            const("<"), {"type": "optional", "content": const("!")}, {"type": "plus", "content": number}, const(">"),
            {"type": "star", "content": {"type": "or", "elements": [const("a"), const("bb")]}},
            {"type": "repeat", "content": const("z"), "min": 1, "max": 2},
            {"type": "tag", "begin": "[", "content": NULL, "end": "]"},
        ]})
    )  # fmt: skip
    for text in ("<12>z[null]", "<!7>abbazz[null]"):
        assert accepts(grammar, text)
    nothing = {"type": "repeat", "content": const("a"), "min": 0, "max": 0}
    assert accepts(compiled(tag({"type": "sequence", "elements": [nothing, const("b")]})), "b")
    for text in ("<>z[null]", "<1>[null]", "<1>zzz[null]", "<1>bz[null]", "<1>z[1]"):
        assert not accepts(grammar, text)


def test_free_text_holds_no_excluded_text_and_no_control_token() -> None:
    think_end = tokenizer().control_id("think_end")
    free = {"type": "any_text", "excludes": ["</think>", "STOP"]}
    grammar = compiled(
        tag({"type": "sequence", "elements": [free, {"type": "token", "token": think_end}, const("ok")]})
    )
    matcher = grammar.matcher()
    assert feed(matcher, tokenizer().encode_text("Hm. </thin STO </div>"))
    assert EOS not in allowed(matcher) and think_end in allowed(matcher)
    assert not any(token_id in allowed(matcher) for token_id in tokenizer().added_ids - {think_end})
    assert not feed(grammar.matcher(), tokenizer().encode_text("a </think> b"))
    assert not feed(grammar.matcher(), tokenizer().encode_text("STOP"))
    assert feed(matcher, [think_end, *tokenizer().encode_text("ok")]) and allowed(matcher) == {EOS}


def test_text_may_hold_the_beginning_of_what_ends_it() -> None:
    """HTML in a string argument: "</" inside does not end it, the closing tag with its control token does."""
    mark = {"type": "token", "token": tokenizer().control_id("dsml")}
    value = {"type": "any_text", "excludes": ["</｜DSML｜"]}
    grammar = compiled(tag({"type": "sequence", "elements": [value, const("</"), mark, const(" parameter>")]}))
    written = tokenizer().encode_text("<p>a</p></") + [mark["token"]] + tokenizer().encode_text(" parameter>")
    matcher = grammar.matcher()
    assert feed(matcher, written) and allowed(matcher) == {EOS}
    assert not feed(grammar.matcher(), tokenizer().encode_text("a</｜DSML｜ parameter>"))


def test_triggered_tags() -> None:
    older = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}
    grammar = compiled({"schema_type": "structural_tag", "schema": json.dumps(older)})
    for text in ("plain", "", "a <f>12</f> b <f>-3</f>", "<g>"):
        assert accepts(grammar, text), text
    for text in ("a <f>x</f>", "a <fx", "a <f>1"):
        assert not accepts(grammar, text), text
    newer = {"type": "triggered_tags", "triggers": ["<f"], "at_least_one": True, "stop_after_first": True, "tags": [
        {"type": "tag", "begin": "<f>", "content": INTEGER, "end": "!"}
    ]}  # fmt: skip
    grammar = compiled(tag(newer))
    assert accepts(grammar, "so <f>1!") and not accepts(grammar, "so") and not accepts(grammar, "<f>1! more")


@pytest.mark.parametrize(
    ("node", "where"),
    [
        ({"type": "sequence", "elements": []}, "format.elements"),
        ({"type": "sequence"}, "format.elements is missing"),
        ({"type": "any_text", "style": 1}, "format.style"),
        ({"type": "token", "token": -1}, "format.token"),
        ({"type": "or", "elements": [{"type": "nope"}]}, "format.elements[0].type"),
        ({"type": "optional", "content": {"type": "const_string", "value": 5}}, "format.content.value"),
        ({"type": "repeat", "content": {"type": "any_text"}, "min": 3, "max": 1}, "format: repeat"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, "'not' at format.json_schema#/not"),
        ({"type": "triggered_tags", "triggers": ["<a"], "tags": [
            {"type": "tag", "begin": "<b", "content": {"type": "any_text"}, "end": ""}]}, "format.tags[0].begin"),
    ],
)  # fmt: skip
def test_malformed_structural_tags_say_where(node: dict[str, Any], where: str) -> None:
    with pytest.raises(ValueError, match="^so_args.schema") as caught:
        compiled(tag(node))
    assert where in str(caught.value)
