"""A matcher's phases, drafts and rollback against a fresh matcher that is fed the same tokens."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.structured import llguidance_backend
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.matcher import EVERYTHING, Grammar, Matcher, fill_masks
from tests.structured.grammars import EOS, allowed, compiled, feed, tokenizer, vocabulary

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"enum": [1, 22]}},
        "required": ["a"],
    }
)
CASES = [
    {"schema_type": "json", "schema": SCHEMA},
    {"schema_type": "regex", "schema": "[a-f]{2,7}x"},
    {"schema_type": "ebnf", "schema": 'root ::= "(" root ")" | [0-9]'},
    {"schema_type": "regex", "schema": "[a-f]{2,7}x", "trigger_token_ids": [300, 301]},
    {"schema_type": "json", "schema": SCHEMA, "trigger_token_ids": [300, 301], "bound_token_id": 302},
]
WORDS = vocabulary().num_words


def bits(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def advance(matcher: Matcher, rng: random.Random, steps: int) -> list[int]:
    """Random allowed tokens; in free generation those of the trigger often enough to get through."""
    out: list[int] = []
    for _ in range(steps):
        choices = sorted(allowed(matcher) - {EOS})
        if not choices:
            break
        likely = [token_id for token_id in (300, 301, 302) if token_id in choices]
        token_id = rng.choice(likely) if likely and rng.random() < 0.7 else rng.choice(choices)
        matcher.accept(token_id)
        out.append(token_id)
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(CASES) - 1), st.integers(0, 10**6), st.integers(0, 8), st.integers(0, 6), st.booleans())
def test_drafts_are_checked_and_taken_back(case: int, seed: int, before: int, count: int, spoil: bool) -> None:
    grammar, rng = compiled(CASES[case]), random.Random(seed)
    matcher = grammar.matcher()
    history = advance(matcher, rng, before)
    ahead = grammar.matcher()
    assert feed(ahead, history)
    drafts = advance(ahead, rng, count)
    if spoil and drafts:
        drafts[rng.randrange(len(drafts))] = rng.choice([EOS, 5, 300, 4000])
    rows = np.full((1 + len(drafts), WORDS), 7, np.int32)
    matcher.fill_masks(drafts, rows)
    oracle = grammar.matcher()
    assert feed(oracle, history)
    position = 0
    while True:
        assert bits(rows[position]) == allowed(oracle)
        if position == len(drafts) or drafts[position] not in allowed(oracle) or drafts[position] == EOS:
            break
        oracle.accept(drafts[position])
        position += 1
    assert (rows[position + 1 :] == EVERYTHING).all()
    unchanged = grammar.matcher()
    assert feed(unchanged, history)
    assert allowed(matcher) == allowed(unchanged) and matcher.failed is None


@pytest.mark.parametrize("ahead", [0, 3])
def test_many_rows_are_filled_like_one(ahead: int) -> None:
    """Matchers in all phases side by side, some with drafts; tokens were accepted one and several at a time."""
    wanted, alone = [], []
    for number in range(12):
        grammar, rng = compiled(CASES[number % len(CASES)]), random.Random(number)
        matcher, twin = grammar.matcher(), grammar.matcher()
        history = advance(twin, rng, number)
        for token_id in history:
            matcher.accept(token_id)
        further = grammar.matcher()
        assert feed(further, history)
        drafts = advance(further, rng, ahead * (number % 2))
        wanted.append((matcher, 5 * number, drafts))
        rows = np.zeros((1 + len(drafts), WORDS), np.int32)
        twin.fill_masks(drafts, rows)
        alone.append(rows)
    mask = np.full((60, WORDS), EVERYTHING, np.int32)
    fill_masks(wanted, mask)
    for (matcher, first, drafts), rows in zip(wanted, alone, strict=True):
        assert bits(mask[first]) == allowed(matcher) == bits(rows[0])
        assert (mask[first : first + 1 + len(drafts)] == rows).all()
        assert (mask[first + 1 + len(drafts) : first + 5] == EVERYTHING).all()


def test_free_generation_lasts_until_the_trigger() -> None:
    matcher = compiled(CASES[3]).matcher()
    assert allowed(matcher) == set(range(8192)) - {EOS}  # an output without its structure is none
    assert feed(matcher, [300, 5, 300, 300])
    assert len(allowed(matcher)) == 8191
    assert feed(matcher, [301])
    assert allowed(matcher) <= {
        i for i in range(8192) if tokenizer().bytes_of(i)[:1] in list(map(bytes, zip(b"abcdef")))
    }


def test_the_bound_forces_the_trigger_through() -> None:
    matcher = compiled(CASES[4]).matcher()
    assert feed(matcher, [9, 300, 302])
    for token_id in (300, 301):
        assert allowed(matcher) == {token_id}
        matcher.accept(token_id)
    assert all(tokenizer().bytes_of(token_id).startswith(b"{") for token_id in allowed(matcher))


def test_the_end_comes_when_the_grammar_allows_it_and_then_only_the_end() -> None:
    matcher = compiled({"schema_type": "regex", "schema": "ab?"}).matcher()
    assert EOS not in allowed(matcher)
    assert feed(matcher, tokenizer().encode_text("a")) and EOS in allowed(matcher) and len(allowed(matcher)) > 1
    assert feed(matcher, tokenizer().encode_text("b")) and allowed(matcher) == {EOS}
    matcher.accept(EOS)  # openvino.genai 4081: a mask after the end, as for drafts that go past it
    assert allowed(matcher) == {EOS}


def test_a_token_that_was_not_allowed_makes_it_fail_once_and_for_all() -> None:
    matcher = compiled({"schema_type": "regex", "schema": "ab"}).matcher()
    matcher.accept(tokenizer().encode_text("b")[0])
    assert matcher.failed and "not allowed" in matcher.failed and allowed(matcher) == set()
    assert not matcher.exhausted
    mask = np.full((2, WORDS), EVERYTHING, np.int32)
    fill_masks([(matcher, 1, ())], mask)
    assert not mask[1].any() and (mask[0] == EVERYTHING).all()


def test_a_grammar_that_becomes_too_complex_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(llguidance_backend._LIMITS, "max_items_in_row", 60)
    small = llguidance_backend.LLGuidanceBackend(vocabulary())
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(40)}}
    schema = json.dumps({"type": "array", "prefixItems": [{"type": "string"}, many], "minItems": 2})
    constraint = Constraint("json", schema)
    complex_one = Grammar(constraint, small.build(small.write(constraint)), small, vocabulary()).matcher()
    fine = compiled({"schema_type": "regex", "schema": "a+"}).matcher()
    assert feed(complex_one, tokenizer().encode_text('["a", {'))
    mask = np.full((2, WORDS), EVERYTHING, np.int32)
    fill_masks([(complex_one, 0, ()), (fine, 1, ())], mask)
    assert complex_one.failed and complex_one.exhausted and not mask[0].any()
    assert bits(mask[1]) == allowed(fine)


def walk(matcher: Matcher, steps: int, rng: random.Random) -> list[int]:
    """At random through what is allowed; the end is not."""
    out = []
    for _ in range(steps):
        choices = sorted(allowed(matcher) - {EOS})
        assert choices, matcher.failed
        out.append(rng.choice(choices))
        matcher.accept(out[-1])
    return out


def test_a_lexer_full_of_states_is_replaced_and_nobody_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that ask for the same share it: what one of them has filled up must be the end of none."""
    so_args = {"schema_type": "regex", "schema": "x{20}.*a.{400}"}
    monkeypatch.setitem(llguidance_backend._LIMITS, "max_lexer_states", 4000)
    constraint = Constraint.from_so_args(so_args)
    small = llguidance_backend.LLGuidanceBackend(vocabulary())
    grammar = Grammar(constraint, small.build(small.write(constraint)), small, vocabulary())
    first = grammar.compiled.root  # type: ignore[attr-defined]
    unlimited = compiled(so_args).matcher()
    matcher, waiting = grammar.matcher(), grammar.matcher()
    assert feed(waiting, tokenizer().encode_text("x" * 20))
    for token_id in walk(unlimited, 100, random.Random(1)):
        assert token_id in allowed(matcher)
        matcher.accept(token_id)
    assert allowed(matcher) == allowed(unlimited) and matcher.failed is None
    assert grammar.compiled.root is not first  # type: ignore[attr-defined]
    text = tokenizer().encode_text("y" * 20)
    for one, drafts in ((waiting, text), (grammar.matcher(), tokenizer().encode_text("x" * 20) + text)):
        mask = np.full((1 + len(drafts), WORDS), EVERYTHING, np.int32)
        one.fill_masks(drafts, mask)  # of the full lexer, and of the new one
        assert one.failed is None and bits(mask[0]) == allowed(one)
        assert all(drafts[row] in bits(mask[row]) and EOS not in bits(mask[row]) for row in range(len(drafts)))
