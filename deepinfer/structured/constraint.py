"""What an output must match, as `SamplingParams.so_args` says it; without torch and without a grammar library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from deepinfer.errors import shown

SchemaType = Literal["regex", "json", "ebnf", "json_object", "choice", "structural_tag"]
SCHEMA_TYPES: tuple[SchemaType, ...] = get_args(SchemaType)
MAX_SCHEMA_BYTES = 256 * 1024
MAX_TAG_BYTES = 4 * 1024 * 1024  # of a structural tag, which holds the schemas of all tools
MAX_TRIGGER = 64  # tokens
_KEYS = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")


@dataclass(frozen=True)
class Constraint:
    """A grammar and where it begins.

    `schema` is a JSON Schema ("json"), a regular expression that the whole output matches ("regex"), rules
    `root ::= ...` ("ebnf"), a JSON list of strings ("choice") or a structural tag ("structural_tag", see
    structural_tag.py); "json_object" has none.

    Without `trigger_token_ids` the grammar begins with the output. With them, the output is free until they have
    appeared in this order; the model may think first. The token `bound_token_id` ends free generation: behind it the
    trigger is forced, token by token.
    """

    schema_type: SchemaType
    schema: str = ""
    trigger_token_ids: tuple[int, ...] = ()
    bound_token_id: int | None = None

    @classmethod
    def from_so_args(cls, so_args: Mapping[str, Any]) -> Constraint:
        """Raises ValueError naming the field. What the schema says is checked when it is compiled."""
        if not isinstance(so_args, Mapping):
            raise ValueError(f"so_args must be a mapping with schema_type and schema, got {shown(so_args)}")
        for key in so_args:
            if key not in _KEYS:
                raise ValueError(f"so_args may hold {', '.join(_KEYS)}, got {shown(key)}")
        kind = so_args.get("schema_type")
        if kind not in SCHEMA_TYPES:
            raise ValueError(f"so_args.schema_type must be one of {', '.join(SCHEMA_TYPES)}, got {shown(kind)}")
        trigger = _token_ids(so_args.get("trigger_token_ids"))
        bound = so_args.get("bound_token_id")
        if bound is not None:
            _check_token_id("so_args.bound_token_id", bound)
            if not trigger:
                raise ValueError("so_args.bound_token_id needs trigger_token_ids: what it forces")
        return cls(kind, _schema_text(kind, so_args.get("schema")), trigger, bound)

    def so_args(self) -> dict[str, Any]:
        """The same as plain values, without what is at its default."""
        found: dict[str, Any] = {"schema_type": self.schema_type}
        if self.schema_type != "json_object":
            found["schema"] = self.schema
        if self.trigger_token_ids:
            found["trigger_token_ids"] = list(self.trigger_token_ids)
        if self.bound_token_id is not None:
            found["bound_token_id"] = self.bound_token_id
        return found

    @property
    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """Token ids by the field that names them."""
        bound = () if self.bound_token_id is None else (self.bound_token_id,)
        return {"so_args.trigger_token_ids": self.trigger_token_ids, "so_args.bound_token_id": bound}


def _schema_text(kind: SchemaType, schema: Any) -> str:
    if kind == "json_object":
        if schema not in (None, "", {}):
            raise ValueError('so_args.schema must be absent with schema_type json_object; use "json" for a schema')
        return ""
    try:
        if kind in ("json", "structural_tag") and isinstance(schema, Mapping | bool):
            schema = json.dumps(schema, ensure_ascii=False)
        elif kind == "choice" and isinstance(schema, Sequence) and not isinstance(schema, str | bytes):
            schema = json.dumps(list(schema), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"so_args.schema must hold values that JSON has, and not itself: {error}") from None
    if not isinstance(schema, str) or not schema:
        raise ValueError(f"so_args.schema must be a non-empty string with schema_type {kind}, got {shown(schema)}")
    try:
        size = len(schema.encode())
    except UnicodeEncodeError:
        raise ValueError("so_args.schema must be Unicode, it holds a lone surrogate") from None
    most = MAX_TAG_BYTES if kind == "structural_tag" else MAX_SCHEMA_BYTES
    if size > most:
        raise ValueError(f"so_args.schema must have at most {most} bytes, got {size}")
    return schema


def check_unicode(value: Any, what: str) -> None:
    """Raise ValueError naming the JSON pointer of a string with a lone surrogate, which escapes can hide in JSON."""
    waiting = [(value, "#")]
    while waiting:
        node, at = waiting.pop()
        if isinstance(node, str) and not is_unicode(node):
            raise ValueError(f"{what} must be Unicode, {at} holds a lone surrogate")
        if isinstance(node, list):
            waiting += [(entry, f"{at}/{number}") for number, entry in enumerate(node)]
        elif isinstance(node, dict):
            for key, entry in node.items():
                if not is_unicode(key):
                    raise ValueError(f"{what} must be Unicode, a name in {at} holds a lone surrogate: {shown(key)}")
                waiting.append((entry, f"{at}/{key.replace('~', '~0').replace('/', '~1')}"))


def is_unicode(text: str) -> bool:
    """Whether it holds no lone surrogate."""
    return not any("\ud800" <= char <= "\udfff" for char in text) if not text.isascii() else True


def _token_ids(values: Any) -> tuple[int, ...]:
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ValueError(f"so_args.trigger_token_ids must be a list of token ids, got {shown(values)}")
    if len(values) > MAX_TRIGGER:
        raise ValueError(f"so_args.trigger_token_ids must hold at most {MAX_TRIGGER} tokens, got {len(values)}")
    for value in values:
        _check_token_id("so_args.trigger_token_ids", value)
    return tuple(values)


def _check_token_id(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a token id >= 0, got {shown(value)}")
