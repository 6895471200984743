"""Structural tags: text with structured parts, in the words of XGrammar's structural tag format.

    {"type": "structural_tag", "format": FORMAT}

FORMAT, by its "type":

    const_string   value: this text
    token          token: the token of this id (control tokens never match text)
    json_schema    json_schema: a value of this schema
    regex          pattern: text that matches it as a whole; excludes: and holds none of these strings
    any_text       excludes: text that holds none of these strings
    sequence, or   elements: all of them in order, one of them
    optional, plus, star   content: at most once, at least once, any number of times
    repeat         content, min, max
    tag            begin, content, end: content between two texts
    triggered_tags triggers, tags, at_least_one, stop_after_first: free text, in which a trigger begins one of the tags

The older form {"structures": [{"begin", "schema", "end"}], "triggers": [...]} means triggered_tags of JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from deepinfer.errors import shown
from deepinfer.structured.constraint import check_unicode
from deepinfer.structured.json_schema import check_schema

MAX_DEPTH = 32
MAX_PARTS = 65_536  # some hundred tools have ten thousands
MAX_REPEAT = 10_000
# type -> fields it must have, fields it may have
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "const_string": (("value",), ()),
    "token": (("token",), ()),
    "json_schema": (("json_schema",), ()),
    "regex": (("pattern",), ("excludes",)),
    "any_text": ((), ("excludes",)),
    "sequence": (("elements",), ()),
    "or": (("elements",), ()),
    "optional": (("content",), ()),
    "plus": (("content",), ()),
    "star": (("content",), ()),
    "repeat": (("content", "min", "max"), ()),
    "tag": (("begin", "content", "end"), ()),
    "triggered_tags": (("triggers", "tags"), ("at_least_one", "stop_after_first")),
}
_WHERE = "so_args.schema"


def read_structural_tag(text: str, eos_token_ids: Collection[int] = ()) -> dict[str, Any]:
    """The FORMAT of a structural tag, checked. Raises ValueError naming what is wrong and where.

    eos_token_ids: they end an output, so they cannot be within one.
    """
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_WHERE} must be a structural tag, it is not JSON: {error}") from None
    check_unicode(tag, _WHERE)
    if isinstance(tag, dict) and "structures" in tag and "triggers" in tag:
        tag = {"type": "structural_tag", "format": _newer_form(tag)}
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or not isinstance(tag.get("format"), dict):
        raise ValueError(f'{_WHERE} must be {{"type": "structural_tag", "format": {{...}}}}, got {shown(text)}')
    _check(tag["format"], "format", MAX_DEPTH, [MAX_PARTS])
    for token_id in tokens_of(tag["format"]) if eos_token_ids else ():
        if token_id in eos_token_ids:
            raise ValueError(f"{_WHERE}: token {token_id} ends an output, it cannot be a part of one")
    return tag["format"]


def _newer_form(tag: dict[str, Any]) -> dict[str, Any]:
    structures = tag["structures"]
    if not isinstance(structures, list) or not all(isinstance(item, dict) for item in structures):
        raise ValueError(f"{_WHERE}: structures must be a list of objects with begin, schema and end")
    tags = []
    for item in structures:
        content = {"type": "json_schema", "json_schema": item.get("schema", True)}
        tags.append({"type": "tag", "begin": item.get("begin"), "content": content, "end": item.get("end")})
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _check(node: Any, path: str, depth: int, left: list[int]) -> None:
    left[0] -= 1
    if depth == 0 or left[0] < 0:
        raise ValueError(f"{_WHERE}: {path}: at most {MAX_DEPTH} levels and {MAX_PARTS} parts are allowed")
    kind = node.get("type") if isinstance(node, dict) else None
    if kind not in _FIELDS:
        raise ValueError(f"{_WHERE}: {path}.type must be one of {', '.join(_FIELDS)}, got {shown(kind)}")
    needed, allowed = _FIELDS[kind]
    for name in needed:
        if name not in node:
            raise ValueError(f"{_WHERE}: {path}.{name} is missing")
    for name, value in node.items():
        if name not in ("type", *needed, *allowed):
            raise ValueError(f"{_WHERE}: {path}.{name} is not supported for {kind}")
        at = f"{path}.{name}"
        if name in ("elements", "tags"):
            if not isinstance(value, list) or not value:
                raise ValueError(f"{_WHERE}: {at} must be a non-empty list")
            for number, entry in enumerate(value):
                if name == "tags" and (not isinstance(entry, dict) or entry.get("type") != "tag"):
                    raise ValueError(f'{_WHERE}: {at}[{number}].type must be "tag"')
                _check(entry, f"{at}[{number}]", depth - 1, left)
        elif name == "content":
            _check(value, at, depth - 1, left)
        elif name in ("excludes", "triggers"):
            if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
                raise ValueError(f"{_WHERE}: {at} must be a list of non-empty strings")
        elif name == "json_schema":
            check_schema(value, f"{at}#")
        elif name in ("token", "min", "max"):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
                raise ValueError(f"{_WHERE}: {at} must be an integer >= 0, got {shown(value)}")
        elif name in ("at_least_one", "stop_after_first"):
            if not isinstance(value, bool):
                raise ValueError(f"{_WHERE}: {at} must be true or false, got {shown(value)}")
        elif name != "type" and not isinstance(value, str):
            raise ValueError(f"{_WHERE}: {at} must be a string, got {shown(value)}")
    if kind == "repeat" and not node["min"] <= node["max"] <= MAX_REPEAT:
        raise ValueError(f"{_WHERE}: {path}: repeat needs min <= max <= {MAX_REPEAT}")
    if kind == "triggered_tags":
        for number, tag in enumerate(node["tags"]):
            if not any(tag["begin"].startswith(trigger) for trigger in node["triggers"]):
                raise ValueError(f"{_WHERE}: {path}.tags[{number}].begin must start with one of the triggers")


def tokens_of(node: dict[str, Any]) -> list[int]:
    """Ids of all tokens that a checked FORMAT names."""
    if node["type"] == "token":
        return [node["token"]]
    children = [*node.get("elements", ()), *node.get("tags", ())]
    if "content" in node:
        children.append(node["content"])
    return [token for child in children for token in tokens_of(child)]
