"""EBNF against Python's own regular expressions, and a checker of brackets; what is refused, by name."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.structured.matcher import Grammar
from tests.structured.grammars import accepts, compiled, tokenizer, walk


def grammar(text: str) -> Grammar:
    return compiled({"schema_type": "ebnf", "schema": text})


def written(rng: random.Random, depth: int, rules: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """A random expression in EBNF and as a regular expression of Python."""
    kind = rng.choice(["text", "class", "class", *(["sequence", "choice", "repeat", "rule"] if depth else [])])
    if kind == "text":
        text = rng.choice(["a", "ab", "b", "ü", "a-", '"', ""])
        return '"' + text.replace('"', '\\"') + '"', re.escape(text)
    if kind == "class":
        return rng.choice([("[ab]", "[ab]"), (r"[\x61-b]", "[a-b]"), (r"[^\u0061]", "[^a]"), ("[-a]", "[-a]")])
    if kind == "repeat":
        inner = written(rng, depth - 1, rules)
        sign = rng.choice(["*", "+", "?", "{2}", "{1,3}", "{ 0, }"])
        return f"({inner[0]}){sign}", f"(?:{inner[1]}){sign.replace(' ', '')}"
    if kind == "rule":
        rule = written(rng, depth - 1, rules)
        name = f"rule-{len(rules)}"
        rules[name] = rule
        return name, f"(?:{rule[1]})"
    parts = [written(rng, depth - 1, rules) for _ in range(rng.randint(1, 3))]
    join = " " if kind == "sequence" else " | "
    return f"({join.join(part[0] for part in parts)})", f"(?:{join.strip().join(part[1] for part in parts)})"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_rules_without_recursion_mean_what_their_regular_expression_means(seed: int) -> None:
    rng = random.Random(seed)
    rules: dict[str, tuple[str, str]] = {}
    root, pattern = written(rng, 3, rules)
    text = "\n# a comment\n".join([f"root ::= {root}", *(f"{name} ::= {rule[0]}" for name, rule in rules.items())])
    made = grammar(text)
    for _ in range(12):
        sample = "".join(rng.choice(["a", "b", "ab", "ü", "-", '"', "c"]) for _ in range(rng.randint(0, 6)))
        assert accepts(made, sample) == bool(re.fullmatch(pattern, sample)), (text, pattern, sample)
    token_ids = walk(made, seed)
    assert token_ids is None or re.fullmatch(pattern, tokenizer().decode(token_ids), re.DOTALL)


def test_recursion() -> None:
    made = grammar('root ::= "(" root ")" | [a-c]+ | root "," [xyz]')
    for text in ("a", "((abc))", "(a),x,y", "((b),z)"):
        assert accepts(made, text)
    for text in ("", "(", "(a", "a)", "a,b", "(a))"):
        assert not accepts(made, text)


def test_a_rule_gives_back_what_others_need() -> None:
    """llguidance's own converter makes a lexeme of each rule, which takes all it can: outputs never end."""
    assert accepts(grammar('root ::= a "b"\na ::= [ab]*'), "aab")
    assert accepts(grammar('root ::= (word " ")* "end"\nword ::= [a-z]+'), "end end")


def test_nothing_may_be_repeated() -> None:
    assert accepts(grammar('root ::= "a"{0,0} "b"'), "b") and accepts(grammar('root ::= "a"{0}'), "")
    made = grammar('root ::= x{0} "b" | "c" root\nx ::= "a"')
    assert accepts(made, "ccb") and not accepts(made, "ab")


@pytest.mark.parametrize("depth", [10, 28, 63])
def test_groups_may_be_nested_as_deeply_as_is_said(depth: int) -> None:
    made = grammar("root ::= " + depth * '("x" | ' + '"a"' + depth * ")*")
    assert accepts(made, "aaxa") and accepts(made, "") and not accepts(made, "ab")
    made = grammar("root ::= " + depth * '("y" ' + '"a" | "b" root' + depth * ")")
    assert accepts(made, depth * "y" + "a") and not accepts(made, depth * "y")
    assert accepts(made, (depth - 1) * "y" + "b" + depth * "y" + "a") and not accepts(made, "b")


@pytest.mark.parametrize(
    ("literal", "text"),
    [(r'"\u00e9\x41\U0001F600"', "éA😀"), (r'"\"\\\n\t"', '"\\\n\t'), (r"[\u4e00-\u9fff]", "日"), (r'"\u00e91"', "é1"),
     (r"[\]\[\-^]", "]"), (r'"a/b"', "a/b"), ('"日本"', "日本"), (".", "\n"), ('"a" # "b"', "a"), ('"a" |', "")],
)  # fmt: skip
def test_characters(literal: str, text: str) -> None:
    assert accepts(grammar(f"root ::= {literal}"), text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('root ::= "a" root', "no finite text satisfies rule 'root'"),
        ('root ::= "x" a?\na ::= b "y"\nb ::= "z" a', "no finite text satisfies rule 'a'"),
        ('root ::= a | "b"\na ::= a', "no finite text satisfies rule 'a'"),
        ("root ::= nope", "line 1: rule 'nope' is not defined"),
        ('rot ::= "a"', "rule 'root' is not defined"),
        ('root ::= a\na ::= "b"\na ::= "c"', "line 3: rule 'a' is defined twice"),
        ('root = "a"', 'a rule must begin with "name ::="'),
        ('root ::= ("a"', '")" is missing'),
        ("root ::= 'a'", "line 1: something that is no part of a rule"),
        ('root ::= "a', "line 1: something that is no part of a rule"),
        ('root ::= * "a"', "repeats nothing"),
        ('root ::= "a"{3,2}', "{3,2} must have"),
        ('root ::= "a"{1,9999999999}', "at most 100000 repetitions"),
        ('root ::= "a"{' + 5000 * "9" + "}", "at most 100000 repetitions"),
        ('root ::= "a"*' + 2000 * "*", "'*' repeats a repetition, which needs a group around it"),
        (r'root ::= "\q"', r"the escape \q is not known"),
        (r'root ::= "\ud800"', "is no character"),
        ("root ::= [z-a]", "the range z-a is empty"),
        ("root ::= []", "a class without characters"),
        ("root ::= " + 100 * "(" + '"a"' + 100 * ")", "nested more than 64 deep"),
        (r"root ::= [^\x00-\U0010FFFF]", "no output satisfies it"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        grammar(text)
    assert str(caught.value).startswith("so_args.schema")
