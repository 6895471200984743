"""JSON Schemas before they are compiled: keywords that nothing here enforces are refused, numbers get a bound.

A validator that does not know a keyword ignores it. So would a grammar, and the output would then satisfy only half of
the schema: whatever is not in the lists below is an error that names the keyword and where it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import quote, unquote

from deepinfer.errors import shown
from deepinfer.structured.constraint import check_unicode
from deepinfer.structured.endless import ENDS, All, Ending, Some, endless, names_in
from deepinfer.structured.regex import portable_pattern

MAX_DEPTH = 64  # of schemas within schemas
MAX_SCHEMAS = 20_000

# Keyword -> what its value holds.
_ONE, _MANY, _MAP, _PLAIN, _NOTE = "a schema", "schemas", "a map of schemas", "a value", "an annotation"
_KEYWORDS = {
    **dict.fromkeys(("additionalProperties", "items", "additionalItems"), _ONE),
    **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), _MANY),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _MAP),
    **dict.fromkeys(
        ("type", "enum", "const", "required", "$ref", "minLength", "maxLength", "pattern", "format", "minItems",
         "maxItems", "minProperties", "maxProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
         "multipleOf"), _PLAIN,
    ),
    **dict.fromkeys(
        ("title", "description", "default", "examples", "$comment", "$schema", "deprecated", "readOnly", "writeOnly"),
        _NOTE,
    ),
}  # fmt: skip
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
# What any value satisfies: hints to a reader, and the types of numbers that hold all which is written here.
FREE_FORMATS = ("int64", "double", "password", "binary", "path", "file-path", "directory-path")
INT32 = (-(2**31), 2**31 - 1)
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
# A model that likes digits would write them for ever; these are the bounds of an unbounded number.
MAX_INTEGER = 10**18
MAX_NUMBER = 10**15
NUMBER_STEP = 1e-9
MAX_EXACT = 2**53 - 1  # grammars compute with float64


def read_schema(text: str) -> Any:
    """The JSON Schema, checked. Raises ValueError naming the keyword and its JSON pointer."""
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("so_args.schema is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"so_args.schema must be a JSON Schema, it is not JSON: {error}") from None
    check_unicode(schema, "so_args.schema")
    check_schema(schema)
    return schema


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def check_schema(schema: Any, path: str = "#") -> None:
    """Raise ValueError naming the keyword and its JSON pointer for whatever cannot be enforced."""
    waiting = [(schema, path, 0)]
    places: dict[str, Any] = {}  # the schemas by their pointers within this one
    references = []
    while waiting:
        node, where, depth = waiting.pop()
        if len(places) == MAX_SCHEMAS:
            raise ValueError(f"so_args.schema must hold at most {MAX_SCHEMAS} schemas")
        places["#" + where[len(path) :]] = node
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise ValueError(f"so_args.schema: {where} must be an object or a boolean, got {shown(node)}")
        if depth > MAX_DEPTH:
            raise ValueError(f"so_args.schema: {where} is nested more than {MAX_DEPTH} deep")
        for key, value in node.items():
            at = f"{where}/{_escape(key)}"
            kind = _NOTE if key == "$id" and depth == 0 else _KEYWORDS.get(key)  # references are local in any case
            if kind is None:
                raise ValueError(f"so_args.schema: keyword {shown(key)} at {at} is not supported")
            if kind == _ONE and key == "items" and isinstance(value, list):
                kind = _MANY  # prefixItems of the older drafts
            if kind == _ONE:
                waiting.append((value, at, depth + 1))
            elif kind == _MANY:
                if not isinstance(value, list) or not (value or key in ("items", "prefixItems")):
                    raise ValueError(f"so_args.schema: {at} must be a non-empty list of schemas, got {shown(value)}")
                waiting += [(entry, f"{at}/{i}", depth + 1) for i, entry in enumerate(value)]
            elif kind == _MAP:
                if not isinstance(value, dict):
                    raise ValueError(f"so_args.schema: {at} must map names to schemas, got {shown(value)}")
                waiting += [(entry, f"{at}/{_escape(name)}", depth + 1) for name, entry in value.items()]
            elif kind == _PLAIN:
                _check_value(key, value, at)
                if key == "$ref":
                    references.append((value, at))
        _check_num_properties(node, where)
    for reference, at in references:  # elsewhere, say in an enum, nobody would have looked at the keywords
        if unquote(reference) not in places:
            raise ValueError(f"so_args.schema: {at} must lead to a schema in this one, got {shown(reference)}")
    never_ending = endless({place: _ending(node, place) for place, node in places.items()})
    if never_ending:
        where = path + never_ending[0][1:]
        raise ValueError(f"so_args.schema: no finite value satisfies {where}: what it needs always needs itself")


def _check_num_properties(schema: dict[str, Any], at: str) -> None:
    """A key that is not declared may come again, and then the object has fewer members than were written."""
    names = schema.get("type", "object")
    is_open = schema.get("additionalProperties") is not False or any(
        entry is not False for entry in schema.get("patternProperties", {}).values()
    )
    sure = len(set(schema.get("required", ()))) + 1  # the first key that is not required is not there yet, either
    if "object" in names and is_open and schema.get("minProperties", 0) > sure:
        message = f"at most {sure} here: only required properties and one more are sure to differ"
        raise ValueError(f"so_args.schema: {at}/minProperties must be {message}, got {shown(schema['minProperties'])}")


def _ending(schema: Any, at: str) -> Ending:
    """Which schemas a value of this one needs values of; everything else in it is taken to be satisfied."""
    if not isinstance(schema, dict):
        return ENDS
    parts: list[Ending] = [f"{at}/allOf/{number}" for number in range(len(schema.get("allOf", ())))]
    if "$ref" in schema:
        parts.append(unquote(schema["$ref"]))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            parts.append(Some(tuple(f"{at}/{key}/{number}" for number in range(len(schema[key])))))
    names = schema.get("type", _TYPES)
    kinds = {names} if isinstance(names, str) else set(names)
    if "const" not in schema and "enum" not in schema and kinds <= {"object", "array"}:
        options = {"object": _object_ending, "array": _array_ending}
        parts.append(Some(tuple(options[kind](schema, at) for kind in sorted(kinds))))
    return All(tuple(parts))


def needed_by(schema: Any, at: str) -> set[str]:
    """The schemas of which a value of this one, whose pointer is `at`, needs values, or of some of which."""
    return set(names_in(_ending(schema, at)))


def _object_ending(schema: dict[str, Any], at: str) -> Ending:
    named = schema.get("properties", {})
    parts = [f"{at}/properties/{_escape(name)}" for name in schema.get("required", ()) if name in named]
    if len(parts) < len(schema.get("required", ())) and "additionalProperties" in schema:
        if "patternProperties" not in schema:
            parts.append(f"{at}/additionalProperties")
    return All(tuple(parts))


def _array_ending(schema: dict[str, Any], at: str) -> Ending:
    key, rest = "prefixItems", "items"
    if isinstance(schema.get("items"), list):
        key, rest = "items", "additionalItems"
    count, first = int(schema.get("minItems", 0)), len(schema.get(key, ()))
    parts = [f"{at}/{key}/{number}" for number in range(min(count, first))]
    if count > first and rest in schema:
        parts.append(f"{at}/{rest}")
    return All(tuple(parts))


def subschemas(schema: Any, at: str) -> Iterator[tuple[str, Any]]:
    """(pointer, schema) of the schemas directly within this checked one, whose pointer is `at`."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        kind = _KEYWORDS.get(key)
        if kind == _MAP:
            yield from ((f"{at}/{key}/{_escape(name)}", entry) for name, entry in value.items())
        elif kind == _MANY or kind == _ONE and isinstance(value, list):
            yield from ((f"{at}/{key}/{number}", entry) for number, entry in enumerate(value))
        elif kind == _ONE:
            yield f"{at}/{key}", value


def moved(schema: Any) -> Any:
    """The checked schema as it must be when it is #/$defs/root of another one: references lead where they led."""
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        kind = _KEYWORDS.get(key)
        if key == "$ref":
            out[key] = "#/$defs/root" + value.removeprefix("#")
        elif kind == _MAP:
            out[key] = {name: moved(entry) for name, entry in value.items()}
        elif kind in (_ONE, _MANY):
            out[key] = [moved(entry) for entry in value] if isinstance(value, list) else moved(value)
        else:
            out[key] = value
    return out


def _check_value(key: str, value: Any, at: str) -> None:
    def must(allowed: str) -> ValueError:
        return ValueError(f"so_args.schema: {at} must be {allowed}, got {shown(value)}")

    if key in ("const", "enum"):
        _check_numbers(value, at)
    if key == "type":
        names = value if isinstance(value, list) else [value]
        if not names or any(name not in _TYPES for name in names):
            raise must(f"one or several of {', '.join(_TYPES)}")
    elif key == "enum":
        if not isinstance(value, list) or not value:
            raise must("a non-empty list")
    elif key == "required":
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise must("a list of names")
    elif key == "$ref":
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise must('a reference within the schema ("#/...")')
    elif key == "format":
        allowed = (*FORMATS, "int32", *FREE_FORMATS)
        if value not in allowed:
            raise must(f"one of {', '.join(allowed)}")
    elif key == "pattern":
        if not isinstance(value, str):
            raise must("a regular expression")
    elif _is_count(key):
        is_count = isinstance(value, int) or isinstance(value, float) and value.is_integer()  # False for infinity
        if isinstance(value, bool) or not is_count or value < 0:
            raise must("an integer >= 0")
    elif key != "const" and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise must("a number")
    elif key != "const":
        _check_numbers(value, at)
        if key == "multipleOf" and value <= 0:
            raise must("a number > 0")


def _check_numbers(value: Any, at: str) -> None:
    """Refuse numbers, within lists and objects, too, of which float64 arithmetic on their digits makes others."""
    waiting = [(value, at)]
    while waiting:
        node, where = waiting.pop()
        if isinstance(node, dict):
            waiting += [(entry, f"{where}/{_escape(name)}") for name, entry in node.items()]
        elif isinstance(node, list):
            waiting += [(entry, f"{where}/{number}") for number, entry in enumerate(node)]
        elif isinstance(node, int | float) and not _is_exact(node):
            allowed = f"between -{MAX_EXACT} and {MAX_EXACT}, with at most 15 digits and 22 places if it is no integer"
            raise ValueError(f"so_args.schema: {where} must be {allowed}, got {shown(node)}")


def _is_exact(number: float) -> bool:
    if not abs(number) <= MAX_EXACT:  # NaN, too
        return False
    if isinstance(number, int) or number.is_integer():
        return True
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return int("".join(map(str, digits))) <= MAX_EXACT and isinstance(exponent, int) and exponent >= -22


def _is_count(key: str) -> bool:
    return key.startswith(("minL", "maxL", "minI", "maxI", "minP", "maxP"))


def bounded(schema: Any) -> dict[str, Any]:
    """The schema with bounds where a number has none, so that no number goes on for ever.

    Every value of the result is a value of the schema. Whatever a schema leaves open (`{}`, members that it does not
    name, items without a schema) becomes a reference to one schema of any value, whose numbers have bounds, too.
    """
    if schema is False:
        raise ValueError("so_args.schema is false: no value satisfies it")
    if isinstance(schema, dict) and _ANY in schema.get("$defs", {}):
        raise ValueError(f"so_args.schema: #/$defs/{_ANY} is a name that is used otherwise")
    result = _bounded(schema)
    result["$defs"] = {**result.get("$defs", {}), _ANY: _ANY_VALUE}
    return result


_ANY = "deepinfer.any"
_ANY_REF = {"$ref": f"#/$defs/{_ANY}"}
_NUMBER_BOUNDS = {"minimum": -MAX_NUMBER, "maximum": MAX_NUMBER, "multipleOf": NUMBER_STEP}
_ANY_VALUE = {
    "anyOf": [
        {"type": "object", "additionalProperties": _ANY_REF},
        {"type": "array", "items": _ANY_REF},
        {"type": ["string", "boolean", "null"]},
        {"type": "number", **_NUMBER_BOUNDS},
    ]
}


def _bounded(schema: Any, is_merged: bool = False) -> Any:
    """`is_merged`: the compiler intersects it with its neighbours, which a reference to any value would never end."""
    if is_merged and schema is True:
        return True
    if schema is True or (isinstance(schema, dict) and not any(key in _ENFORCED for key in schema)):
        defs = {key: schema[key] for key in ("$defs", "definitions") if key in schema} if schema is not True else {}
        return {**_ANY_REF, **{key: {n: _bounded(s) for n, s in value.items()} for key, value in defs.items()}}
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        kind = _KEYWORDS.get(key, _NOTE)
        if kind == _NOTE:
            continue
        if kind == _MAP:
            names = map(portable_pattern, value) if key == "patternProperties" else value
            out[key] = {name: _bounded(entry, is_merged) for name, entry in zip(names, value.values(), strict=True)}
        elif kind == _MANY or isinstance(value, list) and kind == _ONE:
            merges = key == "allOf" or (key in ("anyOf", "oneOf") and len(_ENFORCED & schema.keys()) > 1)
            out[key] = [_bounded(entry, is_merged or merges) for entry in value]
        else:
            out[key] = _bounded(value, is_merged) if kind == _ONE else int(value) if _is_count(key) else value
    if out.get("format") == "int32":
        least, most = INT32
        out["minimum"], out["maximum"] = max(least, out.get("minimum", least)), min(most, out.get("maximum", most))
    if out.get("format") in ("int32", *FREE_FORMATS):
        del out["format"]
    if "pattern" in out:
        out["pattern"] = portable_pattern(out["pattern"])
    if "$ref" in out:  # as an URI, which it need not be here
        out["$ref"] = "#" + quote(unquote(out["$ref"])[1:], safe="/~!$&'()*+,;=:@")
    if not any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")):
        names = schema.get("type", _TYPES)
        for name in [names] if isinstance(names, str) else names:
            if name in _BOUND and not (is_merged and name in ("array", "object")):
                _BOUND[name](out)
    return out


_ENFORCED = {key for key, kind in _KEYWORDS.items() if kind != _NOTE} - {"$defs", "definitions"}


def _bound_integer(schema: dict[str, Any]) -> None:
    _bound_ends(schema, MAX_INTEGER)


def _bound_number(schema: dict[str, Any]) -> None:
    low, high = _limits(schema)
    is_fine = any(x is not None and 0 < abs(x) < 1e3 * NUMBER_STEP for x in (low, high))
    is_narrow = low is not None and high is not None and high - low <= 1e3 * NUMBER_STEP
    if _bound_ends(schema, MAX_NUMBER) and not (is_fine or is_narrow):
        schema.setdefault("multipleOf", NUMBER_STEP)


def _bound_ends(schema: dict[str, Any], most: int) -> bool:
    """False for a schema that means larger numbers than these: it stays as it is."""
    low, high = _limits(schema)
    if any(x is not None and abs(x) > most for x in (low, high)):
        return False
    if low is None:
        schema["minimum"] = -most
    if high is None:
        schema["maximum"] = most
    return True


def _bound_array(schema: dict[str, Any]) -> None:
    rest = "additionalItems" if isinstance(schema.get("items"), list) else "items"
    schema.setdefault(rest, _ANY_REF)


def _bound_object(schema: dict[str, Any]) -> None:
    schema.setdefault("additionalProperties", _ANY_REF)


def _bound_string(schema: dict[str, Any]) -> None:
    longest = _LONGEST.get(schema.get("format", ""))
    if longest is not None:
        schema["maxLength"] = min(longest, schema.get("maxLength", longest))


_LONGEST = {"hostname": 253, "email": 64, "time": 24, "date-time": 35, "duration": 32}
_BOUND = {
    "integer": _bound_integer,
    "number": _bound_number,
    "array": _bound_array,
    "object": _bound_object,
    "string": _bound_string,
}


def _limits(schema: dict[str, Any]) -> tuple[float | None, float | None]:
    lows = [schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema]
    highs = [schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema]
    return (max(lows) if lows else None), (min(highs) if highs else None)


def _escape(name: str) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")
