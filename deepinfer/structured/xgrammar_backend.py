"""Grammars by XGrammar: a pushdown automaton whose masks are mostly computed when it is compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar

from deepinfer.structured.backend import Automaton, GrammarError, Run, at_once, fill_behind
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.ebnf import ebnf_to_lark
from deepinfer.structured.json_schema import bounded, read_schema
from deepinfer.structured.lark import ANY_OBJECT, read_choices
from deepinfer.structured.regex import portable_pattern, without_anchors
from deepinfer.structured.structural_tag import read_structural_tag
from deepinfer.structured.vocabulary import Vocabulary

THREADS = 2
# XGrammar ignores keywords that it does not know, or that stand beside others. Of these it enforces all that they say.
_ALONE = ("$ref", "anyOf", "enum", "const")
_KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set(),
    "boolean": set(),
    "null": set(),
}  # fmt: skip
_NOTES = {"title", "description", "default", "examples", "$comment", "$schema", "$id", "deprecated"}
_DEFINITIONS = {"$defs", "definitions"}


class XGrammarBackend:
    """XGrammar: grammars are EBNF or structural tags; masks are mostly computed when compiling."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        # A token without bytes matches no text.
        tokens = [b"" if i in vocabulary.control_ids else text for i, text in enumerate(vocabulary.token_bytes)]
        tokens += [b""] * (vocabulary.size - len(tokens))
        info = xgrammar.TokenizerInfo(tokens, vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.eos_token_ids))
        self._eos_token_ids = vocabulary.eos_token_ids
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=THREADS)

    def write(self, constraint: Constraint) -> str:
        """JSON: the compiler's method, and what it takes."""
        kind, schema = constraint.schema_type, constraint.schema
        if kind in ("json", "json_object"):
            return _written("json", json.dumps(_enforced(read_schema(schema) if kind == "json" else ANY_OBJECT)))
        if kind == "ebnf":
            ebnf_to_lark(schema)  # it checks the rules
            return _written("ebnf", schema)
        if kind == "regex":
            return _written("regex", portable_pattern(without_anchors(schema)))
        if kind == "choice":
            elements = [{"type": "const_string", "value": choice} for choice in read_choices(schema)]
            return _written("tag", {"type": "or", "elements": elements})
        return _written("tag", _tag(read_structural_tag(schema, self._eos_token_ids)))

    def build(self, grammar: str, run: Run = at_once) -> XGrammarGrammar:
        try:
            compiled = run(lambda: self._build(*json.loads(grammar)))
        except ValueError:
            raise
        except Exception as error:  # it raises RuntimeError and classes of its own for what it does not take
            line = str(error).strip().split("\n")[-1][:300]
            reason = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", line)  # without the library's time and place
            raise ValueError(f"so_args.schema: {reason}") from None
        return XGrammarGrammar(compiled)

    def _build(self, kind: str, source: Any) -> Any:
        if kind == "ebnf":
            return self._compiler.compile_grammar(source)
        if kind == "regex":
            return self._compiler.compile_regex(source)
        if kind == "tag":
            return self._compiler.compile_structural_tag({"type": "structural_tag", "format": source})
        return self._compiler.compile_json_schema(
            source, any_whitespace=False, separators=(", ", ": "), strict_mode=False
        )

    def accept(self, automata: Sequence[XGrammarAutomaton], token_ids: Sequence[Sequence[int]]) -> list[int]:
        return [automaton.accept(tokens) for automaton, tokens in zip(automata, token_ids, strict=True)]

    def fill_masks(
        self,
        automata: Sequence[XGrammarAutomaton],
        drafts: Sequence[Sequence[int]],
        rows: Sequence[int],
        bitmask: np.ndarray,
    ) -> list[tuple[int, str]]:
        alone = [i for i, tokens in enumerate(drafts) if not tokens]
        if alone:
            matchers = [automata[i].matcher for i in alone]
            self._batch.batch_fill_next_token_bitmask(matchers, bitmask, [rows[i] for i in alone])
        failures = []
        for i, tokens in enumerate(drafts):
            if tokens:
                try:
                    fill_behind(automata[i], tokens, bitmask[rows[i] : rows[i] + 1 + len(tokens)])
                except GrammarError as error:
                    failures.append((i, str(error)))
        return failures


class XGrammarGrammar:
    """A compiled grammar of XGrammar."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def automaton(self) -> Automaton:
        return XGrammarAutomaton(xgrammar.GrammarMatcher(self._compiled))


class XGrammarAutomaton:
    """A matcher of XGrammar."""

    __slots__ = ("matcher",)
    exhausted: str | None = None

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token_id in enumerate(token_ids):
            if not self.matcher.accept_token(token_id):
                return count
        return len(token_ids)

    def fill_mask(self, row: np.ndarray) -> None:
        try:
            self.matcher.fill_next_token_bitmask(row[None])
        except RuntimeError as error:
            raise GrammarError(str(error).split("\n")[-1]) from None

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self.matcher.rollback(num_tokens)


def _written(kind: str, source: Any) -> str:
    return json.dumps([kind, source])


def _enforced(schema: Any) -> Any:
    """The bounded schema, if XGrammar enforces all of it. Raises ValueError naming the keyword."""
    _check(schema, "#")
    return _without_steps(bounded(schema))


def _check(schema: Any, path: str) -> None:
    if not isinstance(schema, dict):
        return
    keys = schema.keys() - _NOTES - _DEFINITIONS
    alone = [key for key in _ALONE if key in keys]
    kind = schema.get("type")
    allowed: set[str] = set()
    if alone:
        allowed = {alone[0]}
    elif isinstance(kind, str):
        allowed = {"type"} | _KEYWORDS[kind]
    wrong = sorted(keys - allowed)
    wrong += ["required"] * (not schema.get("properties", {}).keys() >= set(schema.get("required", ())))
    if wrong:
        message = f"keyword {wrong[0]!r} at {path}/{wrong[0]} is not supported by xgrammar, or not beside the others"
        raise ValueError(f"so_args.schema: {message}")
    for key in ("properties", "$defs", "definitions"):
        for name, entry in schema.get(key, {}).items():
            _check(entry, f"{path}/{key}/{name}")
    for key in ("anyOf", "prefixItems"):
        for number, entry in enumerate(schema.get(key, ())):
            _check(entry, f"{path}/{key}/{number}")
    for key in ("items", "additionalProperties"):
        _check(schema.get(key), f"{path}/{key}")


def _without_steps(schema: Any) -> Any:
    """Without the bounds of numbers that are no integers: XGrammar has none for them."""
    if isinstance(schema, list):
        return [_without_steps(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    steps = ("multipleOf", "minimum", "maximum") if "multipleOf" in schema else ()
    return {key: _without_steps(value) for key, value in schema.items() if key not in steps}


def _tag(node: dict[str, Any]) -> dict[str, Any]:
    """A FORMAT of structural_tag.py as XGrammar takes it."""
    if node.get("type") == "regex":
        if node.get("excludes"):
            raise ValueError("so_args.schema: a regex with excludes is not supported by xgrammar")
        return {"type": "regex", "pattern": portable_pattern(without_anchors(node["pattern"]))}
    if node.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": _enforced(node["json_schema"])}
    out = dict(node)
    for key in ("elements", "tags"):
        if key in out:
            out[key] = [_tag(entry) for entry in out[key]]
    if "content" in out:
        out["content"] = _tag(out["content"])
    return out
