"""Compiled grammars over nano's vocabulary, walked at random without a model."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

import deepinfer
from deepinfer.checkpoint_tokenizer import load_tokenizer
from deepinfer.recipe import Tokenizer
from deepinfer.structured.backend import Backend, make_backend
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.loading import load_vocabulary
from deepinfer.structured.matcher import Grammar, Matcher
from deepinfer.structured.vocabulary import Vocabulary

NANO = Path(deepinfer.__file__).parent / "checkpoints" / "nano"
VOCAB_SIZE, EOS = 8192, 1
REPEATED: dict[str, Any] = {"type": "const_string", "value": "a"}  # too complex for any step
for _ in range(2):
    REPEATED = {"type": "repeat", "content": REPEATED, "min": 9999, "max": 10_000}

REGEX = {"schema_type": "regex", "schema": "[a-c]{3}"}
TOO_COMPLEX = {
    "schema_type": "json",
    "schema": json.dumps({"type": "string", "allOf": [{"pattern": f".*a.{{{n}}}"} for n in range(10, 24)]}),
}
_SLOW = '{{"anyOf": [{{"type": "string", "maxLength": {}}}, {{"type": "integer", "multipleOf": 2000003}}]}}'


def slow_schema(number: int) -> dict[str, str]:
    """One of many that take seconds to compile."""
    return {"schema_type": "json", "schema": _SLOW.format(number)}


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(NANO)


@functools.cache
def vocabulary() -> Vocabulary:
    return load_vocabulary(NANO, VOCAB_SIZE, [EOS])


@functools.cache
def backend(name: str = "llguidance") -> Backend:
    return make_backend(name, vocabulary())


def compiled(so_args: dict[str, Any], name: str = "llguidance") -> Grammar:
    """Raises ValueError as a compiler does."""
    constraint = Constraint.from_so_args(so_args)
    library = backend(name)
    return Grammar(constraint, library.build(library.write(constraint)), library, vocabulary())


def tag(node: dict[str, Any]) -> dict[str, Any]:
    return {"schema_type": "structural_tag", "schema": {"type": "structural_tag", "format": node}}


def allowed(matcher: Matcher) -> set[int]:
    row = np.zeros((1, vocabulary().num_words), np.int32)
    matcher.fill_masks((), row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def feed(matcher: Matcher, token_ids: list[int]) -> bool:
    """Whether every token was allowed in its place."""
    for token_id in token_ids:
        if token_id not in allowed(matcher):
            return False
        matcher.accept(token_id)
    return True


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the text, in its usual tokens, is an output that may end there."""
    matcher = grammar.matcher()
    return feed(matcher, tokenizer().encode_text(text)) and EOS in allowed(matcher)


def walk(
    grammar: Grammar, seed: int, hurry: float = 0.4, steps: int = 400, first: tuple[str, ...] = ()
) -> list[int] | None:
    """Tokens of a random output; None if it does not end. In a hurry it ends, or closes something (`first` first)."""
    rng, matcher, out = random.Random(seed), grammar.matcher(), []
    controls = [tokenizer().control_id(role) for role in ("think_end", "dsml")]
    texts = (*first, '"', "}", "]", ", ", ":", "</", "<", "\n")
    closing = [EOS, *controls, *(tokenizer().encode_text(text)[0] for text in texts)]
    for _ in range(steps):
        choices = allowed(matcher)
        assert choices, f"dead end behind {tokenizer().decode(out)!r}: {matcher.failed}"
        wanted = [token_id for token_id in closing if token_id in choices] if rng.random() < hurry else []
        token_id = wanted[0] if wanted else rng.choice(sorted(choices))
        if token_id == EOS:
            return out
        out.append(token_id)
        matcher.accept(token_id)
        assert matcher.failed is None
    return None


def generated_schema(rng: random.Random, depth: int = 3) -> Any:
    """A random JSON Schema of the keywords that are enforced."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "any"]
    kind = rng.choice([*kinds, "object", "object", "object", "array", "array", "anyOf"] if depth else kinds)
    if kind == "any":
        return rng.choice([{}, True])
    if kind == "object":
        names = rng.sample(["id", "name", "größe", "a b", "x/y", "tags", "next", "~t", 'q"q'], rng.randint(0, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {n: generated_schema(rng, depth - 1) for n in names}}
        schema["required"] = [name for name in names if rng.random() < 0.6]
        if rng.random() < 0.6:
            schema["additionalProperties"] = rng.choice([False, {"type": "integer"}])
        return schema
    if kind == "array":
        schema = {"type": "array", "items": generated_schema(rng, depth - 1)}
        if rng.random() < 0.7:
            schema["minItems"] = rng.randint(0, 2)
            schema["maxItems"] = schema["minItems"] + rng.randint(0, 2)
        if rng.random() < 0.2:
            schema["prefixItems"] = [generated_schema(rng, 0)]
        return schema
    if kind == "anyOf":
        return {"anyOf": [generated_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "enum":
        return {"enum": rng.sample(["a", "b c", "ü", 1, 2.5, -3, True, None, "", "</x>"], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["k", 7, None, False, [1, "a"], {"a": 1}])}
    if kind == "string":
        extra = rng.choice(
            [{}, {"minLength": 1, "maxLength": 6}, {"pattern": r"^[a-z]{2,5}\d?$"}, {"format": "date"},
             {"format": "uuid"}, {"format": "ipv4"}, {"pattern": "a.c"}],
        )  # fmt: skip
        return {"type": "string", **extra}
    if kind in ("integer", "number"):
        extra = rng.choice(
            [{}, {"minimum": -5, "maximum": 12}, {"exclusiveMinimum": 0}, {"maximum": 3}, {"multipleOf": 5},
             {"minimum": 1e6}],
        )  # fmt: skip
        return {"type": kind, **extra}
    return {"type": kind}


def as_written(value: Any) -> str:
    """JSON in the separators that grammars allow."""
    return json.dumps(value, ensure_ascii=False)
