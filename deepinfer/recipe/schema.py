"""JSON Schemas of requests: are they schemas at all, and strict mode's normal form (recipe spec, 2: Format)."""

import re
from collections.abc import Callable
from typing import Any

from deepinfer.recipe import json_text
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import describe

_TYPES = ("object", "string", "number", "integer", "boolean", "array", "null")
# The last four are OpenAI's: its clients write them for dates and times.
_STRING_FORMATS = ("email", "hostname", "ipv4", "ipv6", "uuid", "date-time", "time", "date", "duration")
_NUMBER_KEYS = (
    "description", "const", "default", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
)  # fmt: skip
# Keywords that strict mode keeps, in the order it writes them.
_STRICT_KEYS = {
    "string": ("description", "pattern", "format", "enum"),
    "number": _NUMBER_KEYS,
    "integer": _NUMBER_KEYS,
    "boolean": ("description",),
    "null": ("description",),
}

_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_STRINGS = ("title", "description", "$ref", "$id", "$schema", "$comment", "format")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def schema_fault(schema: Any) -> str | None:
    """Why this is not a JSON Schema, or None.  Looks at the keywords that schemas of requests use."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return f'{json_text.compact(schema)} is not of types "boolean", "object"'
    for key, value in schema.items():
        fault = _keyword_fault(key, value)
        if fault:
            return fault
    return None


def _keyword_fault(key: str, value: Any) -> str | None:
    shown = json_text.compact(value)
    if key == "type":
        names = value if isinstance(value, list) else [value]
        if not names or any(name not in _TYPES for name in names):
            return f"{shown} is not valid under any of the schemas listed in the 'anyOf' keyword"
    elif key in _SCHEMA_MAPS:
        if not isinstance(value, dict):
            return f'{shown} is not of type "object"'
        return next(filter(None, map(schema_fault, value.values())), None)
    elif key in _SCHEMA_LISTS:
        if not isinstance(value, list):
            return f'{shown} is not of type "array"'
        if not value:
            return "[] has less than 1 item"
        return next(filter(None, map(schema_fault, value)), None)
    elif key in _SCHEMAS:
        return schema_fault(value)
    elif key in ("required", "enum") and not isinstance(value, list):
        return f'{shown} is not of type "array"'
    elif key == "required":
        wrong = next((name for name in value if not isinstance(name, str)), None)
        return None if wrong is None else f'{json_text.compact(wrong)} is not of type "string"'
    elif key in _STRINGS and not isinstance(value, str):
        return f'{shown} is not of type "string"'
    elif key == "pattern":
        return None if isinstance(value, str) and _compiles(value) else f'{shown} is not a "regex"'
    elif key in _NUMBERS and not _is_number(value):
        return f'{shown} is not of type "number"'
    elif key == "multipleOf":
        if not _is_number(value):
            return f'{shown} is not of type "number"'
        if value <= 0:
            return f"{shown} is less than or equal to the minimum of 0"
    elif key in _COUNTS:
        if isinstance(value, bool) or not isinstance(value, int):
            return f'{shown} is not of type "integer"'
        if value < 0:
            return f"{shown} is less than the minimum of 0"
    return None


def check_format_schema(schema: Any, strict: bool, path: str) -> Any:
    """The schema of a response format as it is to be enforced; the prompt shows it as the client wrote it.

    ``path`` is where the client wrote it.
    """
    try:
        if strict:
            return strict_schema(schema, "Invalid json schema: ", "json schema")
        fault = schema_fault(schema)
        if fault:
            raise ConversionError(f"Invalid json schema: {fault}", "response_format")
    except ConversionError as error:
        raise error.at(path) from None
    return schema


def closed_schema(schema: Any) -> Any:
    """The schema as strict mode means it: its objects have exactly their properties, and nothing of it is dropped."""
    if isinstance(schema, list):
        return [closed_schema(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        is_map = key in _SCHEMA_MAPS and isinstance(value, dict)
        if is_map:
            out[key] = {name: closed_schema(entry) for name, entry in value.items()}
        else:
            out[key] = closed_schema(value) if key in (*_SCHEMA_LISTS, *_SCHEMAS) else value
    if schema.get("type") == "object":
        properties = schema.get("properties") or {}
        out = {**out, "properties": out.get("properties") or {}}
        out.setdefault("additionalProperties", False)
        out.setdefault("required", list(properties))
    return out


def strict_schema(schema: Any, what: str, where: str, empty_object: bool = False) -> Any:
    """The schema with ``additionalProperties: false`` and ``required`` everywhere, keywords in a fixed order.

    ``what`` starts the message about a malformed schema, ``where`` names the schema whose top level must be an object;
    ``empty_object`` lets the top level have no properties.  Raises ConversionError when the schema leaves something
    optional or uses what strict mode does not know.
    """

    def refuse(message: str) -> ConversionError:
        return ConversionError(f"{what}{message}", where)

    if isinstance(schema, dict) and (schema.get("type") != "object") and _has_kind(schema):
        _strict(schema, refuse)
        raise ConversionError(f"The top level of the {where} must be an object.", where)
    if empty_object and _is_empty_object(schema):
        return {"type": "object", "properties": {}, "additionalProperties": False, "required": []}
    return _strict(schema, refuse)


def _strict(schema: Any, refuse: Callable[[str], ConversionError]) -> Any:
    if not isinstance(schema, dict) or not _has_kind(schema):
        raise refuse("one of `type`, `anyOf`, `$ref` field is required")
    kind = schema.get("type")
    if isinstance(kind, list):
        return _strict_union(schema, kind, refuse)
    if kind is None:
        return _strict_untyped(schema, refuse)
    if not isinstance(kind, str):
        raise refuse(f"invalid type: {describe(kind)}, expected variant identifier")
    if kind not in _TYPES:
        raise refuse(f"unknown variant `{kind}`, expected one of {', '.join(f'`{name}`' for name in _TYPES)}")
    if kind == "object":
        return _strict_object(schema, refuse)
    if kind == "array":
        if "items" not in schema:
            raise refuse("missing field `items`")
        return {"type": "array", "items": _strict(schema["items"], refuse), **_kept(schema, ("description",))}
    if kind == "string" and schema.get("format") not in (None, *_STRING_FORMATS):
        names = ", ".join(f"`{name}`" for name in _STRING_FORMATS)
        raise refuse(f"unknown variant `{schema['format']}`, expected one of {names}")
    return {"type": kind, **_kept(schema, _STRICT_KEYS[kind])}


def _strict_union(schema: Any, kinds: list[Any], refuse: Callable[[str], ConversionError]) -> Any:
    allowed = ("string", "number", "integer", "boolean", "null")
    for kind in kinds:
        if kind not in allowed:
            names = ", ".join(f"`{name}`" for name in allowed)
            raise refuse(f"field `type`: unknown variant `{kind}`, expected one of {names}")
    return {"type": kinds, **_kept(schema, ("description",))}


def _strict_untyped(schema: Any, refuse: Callable[[str], ConversionError]) -> Any:
    if "anyOf" in schema:
        if not isinstance(schema["anyOf"], list):
            raise refuse(f"field `anyOf`: invalid type: {describe(schema['anyOf'])}, expected a sequence")
        return {"anyOf": [_strict(entry, refuse) for entry in schema["anyOf"]], **_kept(schema, ("description",))}
    if not isinstance(schema["$ref"], str):
        raise refuse(f"field `$ref`: invalid type: {describe(schema['$ref'])}, expected a string")
    return {"$ref": schema["$ref"]}


def _strict_object(schema: Any, refuse: Callable[[str], ConversionError]) -> Any:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise refuse(f"invalid type: {describe(properties)}, expected a map")
    names = schema.get("required")
    if names is not None and not isinstance(names, list):
        raise refuse(f"invalid type: {describe(names)}, expected a sequence")
    if not properties:
        raise ConversionError("An object with no properties is not allowed.")
    if schema.get("additionalProperties") not in (None, False):
        raise ConversionError("additionalProperties should not be true")
    for name in names or []:
        if name not in properties:
            raise ConversionError(f"Required property '{name}' not found in object")
    if names is not None and set(names) != set(properties):
        raise ConversionError("Required properties must match all properties in the object")
    out = {
        "type": "object",
        "properties": {name: _strict(value, refuse) for name, value in properties.items()},
        "additionalProperties": False,
        "required": list(properties) if names is None else names,
        **_kept(schema, ("description",)),
    }
    for key in ("$defs", "definitions"):  # references must not dangle
        if isinstance(schema.get(key), dict):
            out[key] = {name: _strict(value, refuse) for name, value in schema[key].items()}
    return out


def _is_empty_object(schema: Any) -> bool:
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return False
    return schema.get("properties") in (None, {}) and schema.get("required") in (None, [])


def _has_kind(schema: dict[str, Any]) -> bool:
    return any(schema.get(key) is not None for key in ("type", "anyOf", "$ref"))


def _kept(schema: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: schema[key] for key in keys if schema.get(key) is not None}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True
