"""The other grammar library, where it is installed: what it accepts it enforces, like the default."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import jsonschema
import pytest

from deepinfer.structured.backend import make_backend
from tests.structured.grammars import EOS, accepts, allowed, compiled, feed, tokenizer, vocabulary, walk
from tests.structured.test_grammars import SEED_CASES
from tests.structured.test_json_schema import SUITE, as_written

INSTALLED = importlib.util.find_spec("xgrammar") is not None
needs_it = pytest.mark.skipif(not INSTALLED, reason="xgrammar is not installed")


def test_backends_that_are_not_there_are_named() -> None:
    with pytest.raises(ValueError, match="DEEPINFER_GRAMMAR_BACKEND must be one of llguidance, xgrammar"):
        make_backend("outlines", vocabulary())
    if not INSTALLED:
        with pytest.raises(ValueError, match=r"pip install 'deepinfer\[xgrammar\]'"):
            make_backend("xgrammar", vocabulary())


@needs_it
@pytest.mark.parametrize(("kind", "schema", "pattern"), SEED_CASES[:5])
def test_outputs_match(kind: str, schema: str, pattern: str) -> None:
    grammar = compiled({"schema_type": kind, "schema": schema}, "xgrammar")
    for out in (walk(grammar, seed) for seed in range(10)):
        assert out is None or re.fullmatch(pattern, tokenizer().decode(out))


@needs_it
def test_suite_schemas_are_enforced_or_refused() -> None:
    num_compiled = 0
    for case in SUITE:
        schema: Any = case["schema"]
        try:
            grammar = compiled({"schema_type": "json", "schema": json.dumps(schema)}, "xgrammar")
        except ValueError as error:
            assert str(error).startswith("so_args.schema")
            continue
        num_compiled += 1
        judge = jsonschema.Draft202012Validator(schema)
        for seed in range(3):
            token_ids = walk(grammar, seed)
            assert token_ids is None or judge.is_valid(json.loads(tokenizer().decode(token_ids))), schema
        for instance, _ in case["tests"]:
            assert judge.is_valid(instance) or not accepts(grammar, as_written(instance)), (schema, instance)
    assert num_compiled >= 30


@needs_it
def test_drafts_and_the_end() -> None:
    import numpy as np

    matcher = compiled({"schema_type": "regex", "schema": "abc"}, "xgrammar").matcher()
    drafts = [tokenizer().encode_text(char)[0] for char in "abx"]
    rows = np.zeros((4, vocabulary().num_words), np.int32)
    matcher.fill_masks(drafts, rows)
    assert (rows[3] == -1).all() and not (rows[2] == -1).all()
    assert feed(matcher, drafts[:2]) and feed(matcher, tokenizer().encode_text("c")) and allowed(matcher) == {EOS}
