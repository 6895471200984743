"""Constraints as grammars in llguidance's Lark dialect.

Rules are lower case, lexemes upper case. A lexeme never matches a control token; `<[id]>` does. Text in front of
a fixed text is one lexeme with it, because lexemes take as much as they can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from deepinfer.structured.constraint import Constraint, check_unicode
from deepinfer.structured.ebnf import ebnf_to_lark
from deepinfer.structured.json_schema import bounded, read_schema
from deepinfer.structured.regex import portable_pattern, without_anchors
from deepinfer.structured.structural_tag import read_structural_tag

# Whitespace between JSON tokens is fixed, so that it cannot go on for ever; these are the separators of the prompt.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT = {"type": "object"}
MAX_CHOICES = 16_384
_ANY_TEXT = "/(?s:.*)/"
_CONTROL = re.compile(r"[^\n\r\t\x20-\x7e\xa0-\U0010ffff]")  # what strings of Lark cannot hold


def to_lark(constraint: Constraint, eos_token_ids: Collection[int] = ()) -> str:
    """The grammar of a constraint. Raises ValueError for a schema that is malformed or cannot be enforced."""
    kind = constraint.schema_type
    if kind == "json":
        return _HEAD + f"start: {_json(read_schema(constraint.schema))}\n"
    if kind == "json_object":
        return _HEAD + f"start: {_json(ANY_OBJECT)}\n"
    if kind == "regex":
        return _HEAD + f"start: TEXT\nTEXT: {_regex(constraint.schema)}\n"
    if kind == "ebnf":
        return ebnf_to_lark(constraint.schema)
    if kind == "choice":
        return _HEAD + "start: " + " | ".join(map(_literal, read_choices(constraint.schema))) + "\n"
    return _TagGrammar().text(read_structural_tag(constraint.schema, eos_token_ids))


_HEAD = "%llguidance {}\n"


def read_choices(text: str) -> list[str]:
    """Each choice once. Raises ValueError."""
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"so_args.schema must be a JSON list of strings with schema_type choice: {error}") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("so_args.schema must be a JSON list of non-empty strings with schema_type choice")
    check_unicode(choices, "so_args.schema")
    choices = list(dict.fromkeys(choices))
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"so_args.schema must have at most {MAX_CHOICES} choices, got {len(choices)}")
    return choices


def _json(schema: Any) -> str:
    return "%json " + json.dumps({**bounded(schema), "x-guidance": JSON_OPTIONS})


def _literal(text: str) -> str:
    return f"/{_quoted(text)}/" if _CONTROL.search(text) else json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    """A pattern that the text matches as a whole, as a lexeme; anchors at its ends say nothing new."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(portable_pattern(without_anchors(pattern)), '')}/"


class _TagGrammar:
    """Writes a FORMAT of structural_tag.py as rules. Equal parts share a rule: of hundreds of tools, most are."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, bool], str] = {}  # (body, whether it is a lexeme) -> its rule

    def text(self, node: dict[str, Any]) -> str:
        start = self._part(node)
        lines = [f"{name}: {body}" for (body, _), name in self._names.items()]
        return _HEAD + "\n".join([f"start: {start}", *lines]) + "\n"

    def _rule(self, body: str, lexeme: bool = False) -> str:
        return self._names.setdefault((body, lexeme), f"{'T' if lexeme else 'r'}{len(self._names)}")

    def _part(self, node: dict[str, Any]) -> str:
        kind = node["type"]
        if kind == "const_string":
            return _literal(node["value"])
        if kind == "token":
            return f"<[{node['token']}]>"
        if kind == "json_schema":
            return self._rule(_json(node["json_schema"]))
        if kind in ("regex", "any_text"):
            return self._rule(self._lexeme(node), lexeme=True)
        if kind == "sequence":
            return self._rule(self._sequence(node["elements"]))
        if kind == "or":
            return self._rule(" | ".join(self._part(element) for element in node["elements"]))
        if kind == "tag":
            begin, end = ({"type": "const_string", "value": node[name]} for name in ("begin", "end"))
            return self._rule(self._sequence([begin, node["content"], end]))
        if kind == "triggered_tags":
            return self._triggered(node)
        if kind == "repeat" and node["max"] == 0:
            return _literal("")
        content = self._rule(self._part(node["content"]))
        if kind == "repeat":
            return self._rule(f"{content}{{{node['min']},{node['max']}}}")
        return self._rule(content + {"optional": "?", "plus": "+", "star": "*"}[kind])

    def _sequence(self, elements: list[dict[str, Any]]) -> str:
        parts, position = [], 0
        while position < len(elements):
            node = elements[position]
            behind = elements[position + 1] if position + 1 < len(elements) else {}
            if node["type"] in ("regex", "any_text") and behind.get("type") == "const_string" and behind["value"]:
                text = self._rule(self._lexeme(node), lexeme=True)
                parts.append(self._rule(f"{text} {_literal(behind['value'])}", lexeme=True))
                position += 2
            else:
                parts.append(self._part(node))
                position += 1
        return " ".join(parts)

    def _lexeme(self, node: dict[str, Any]) -> str:
        body = _regex(node["pattern"]) if node["type"] == "regex" else _ANY_TEXT
        return " & ".join([body, *(f"~/(?s:.*){_quoted(text)}(?s:.*)/" for text in node.get("excludes", ()))])

    def _triggered(self, node: dict[str, Any]) -> str:
        """Free text, then a tag, and so on. A trigger in the text begins a tag, so text up to it is one lazy lexeme."""
        free = self._rule(self._lexeme({"type": "any_text", "excludes": node["triggers"]}), lexeme=True)
        branches = []
        for trigger in dict.fromkeys(node["triggers"]):
            tags = [tag for tag in node["tags"] if _trigger_of(tag["begin"], node["triggers"]) == trigger]
            if not tags:
                continue
            opening = self._rule(f"{free} {_literal(trigger)}", lexeme=True)
            rests = []
            for tag in tags:
                begin = {"type": "const_string", "value": tag["begin"][len(trigger) :]}
                rests.append(self._part({"type": "tag", **tag, "begin": begin["value"]}))
            branches.append(f"{opening} ({' | '.join(rests)})")
        tagged = self._rule(" | ".join(branches))
        if node.get("stop_after_first"):
            return tagged if node.get("at_least_one") else self._rule(f"{tagged} | {free}")
        return self._rule(f"{tagged}{'+' if node.get('at_least_one') else '*'} {free}")


def _trigger_of(begin: str, triggers: list[str]) -> str:
    """The longest trigger that begins the tag."""
    return max((trigger for trigger in triggers if begin.startswith(trigger)), key=len)


def _quoted(text: str) -> str:
    """Text as a regular expression."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)
