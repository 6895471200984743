"""Reading typed fields out of parsed JSON, with errors that name the field and what was expected."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from deepinfer.recipe import json_text
from deepinfer.recipe.errors import RequestError

T = TypeVar("T")
Json = dict[str, Any]


def parse_body(body: str | bytes | Json, kind: str) -> Json:
    """The request body as an object.  Raises RequestError when it is not JSON or not an object."""
    value: Any = body
    if isinstance(body, str | bytes):
        try:
            value = json_text.loads(body if isinstance(body, str) else body.decode("utf-8"))
        except ValueError as error:  # also what decoding raises for bytes that are not UTF-8
            raise RequestError(f"invalid JSON request: {error}") from None
    else:
        value = _reread(body)
    if not isinstance(value, dict):
        refuse(f"invalid type: {describe(value)}, expected struct {kind}", "")
    return value


def _reread(body: Any) -> Any:
    """Hold a Python object to the rules of JSON text."""
    try:
        return json_text.loads(json_text.dumps(body))
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"invalid JSON request: {error}") from None


def refuse(message: str, param: str) -> NoReturn:
    """Raises RequestError, as the public library words it."""
    raise RequestError(f"invalid request body: {message}", param)


def describe(value: Any) -> str:
    """A JSON value in an error message."""
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int():
            return f"integer `{value}`"
        case float():
            return f"floating point `{json_text.rust_float(value)}`"
        case str():
            return f"string {json_text.dumps(value)}"
        case dict():
            return "map"
        case _:
            return "sequence"


def join(path: str, key: str | int) -> str:
    """The path of a member or an entry: `a.b`, `a[0]`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def text(value: Any, path: str) -> str:
    """A string.  Raises RequestError."""
    if not isinstance(value, str):
        refuse(f"invalid type: {describe(value)}, expected a string", path)
    return value


def boolean(value: Any, path: str) -> bool:
    """True or false.  Raises RequestError."""
    if not isinstance(value, bool):
        refuse(f"invalid type: {describe(value)}, expected a boolean", path)
    return value


def number(value: Any, path: str) -> float:
    """A number, not a boolean.  Raises RequestError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(f"invalid type: {describe(value)}, expected f32", path)
    return float(value)


def unsigned(bits: int) -> Callable[[Any, str], int]:
    """Reader of an integer in [0, 2**bits)."""

    def read(value: Any, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(f"invalid type: {describe(value)}, expected u{bits}", path)
        if not 0 <= value < 2**bits:
            refuse(f"invalid value: {describe(value)}, expected u{bits}", path)
        return value

    return read


def signed(value: Any, path: str) -> int:
    """An integer.  Raises RequestError."""
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(f"invalid type: {describe(value)}, expected an integer", path)
    return value


def sequence(value: Any, path: str) -> list[Any]:
    """A list.  Raises RequestError."""
    if not isinstance(value, list):
        refuse(f"invalid type: {describe(value)}, expected a sequence", path)
    return value


def struct(kind: str) -> Callable[[Any, str], Json]:
    """Reader of an object; ``kind`` names it in errors."""

    def read(value: Any, path: str) -> Json:
        if not isinstance(value, dict):
            refuse(f"invalid type: {describe(value)}, expected {kind}", path)
        return value

    return read


def one_of(allowed: Sequence[str]) -> Callable[[Any, str], str]:
    """Reader of a string out of ``allowed``."""
    names = ", ".join(f"`{name}`" for name in allowed)
    expected = f"expected one of {names}" if len(allowed) > 1 else f"expected {names}"

    def read(value: Any, path: str) -> str:
        if not isinstance(value, str):
            refuse(f"invalid type: {describe(value)}, expected variant identifier", path)
        if value not in allowed:
            refuse(f"unknown variant `{value}`, {expected}", path)
        return value

    return read


def required(obj: Json, key: str, read: Callable[[Any, str], T], path: str) -> T:
    """The field as `read` reads it.  Raises RequestError when it is absent."""
    if key not in obj:
        refuse(f"missing field `{key}`", join(path, key))
    return read(obj[key], join(path, key))


def optional(obj: Json, key: str, read: Callable[[Any, str], T], path: str) -> T | None:
    """The field, or None when it is absent or null."""
    value = obj.get(key)
    return None if value is None else read(value, join(path, key))


def tagged(value: Any, path: str, kind: str, allowed: Sequence[str], tag: str = "type") -> tuple[str, Json]:
    """An object told apart by its ``tag`` field: (tag value, object)."""
    obj = struct(f"internally tagged enum {kind}")(value, path)
    return required(obj, tag, one_of(allowed), path), obj
