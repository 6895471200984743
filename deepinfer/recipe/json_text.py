"""JSON in and out the way prompts spell it: request key order, raw non-ASCII, shortest numbers (0.10 -> 0.1).

V4.1 prompts spell floats as Python does (1e-05), V4 prompts and constraints as Rust does (0.00001).
"""

import json
import math
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any

MAX_DEPTH = 127  # nesting that the public library accepts; deeper requests are refused rather than risked


def loads(text: str) -> Any:
    """Parse JSON text strictly.

    Duplicate keys keep the first position and the last value.  Raises ValueError for bad JSON, NaN, numbers beyond
    float64, lone surrogates and nesting deeper than MAX_DEPTH.
    """
    try:
        value = json.loads(text, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("recursion limit exceeded") from None
    _check(value)
    return value


def dumps(
    value: Any,
    item_separator: str = ", ",
    key_separator: str = ": ",
    spell_float: Callable[[float], str] = repr,
) -> str:
    """Write JSON with the separators of prompts.

    ``spell_float`` writes finite floats.  Raises ValueError for values that JSON cannot hold (NaN, infinities, unknown
    types).
    """
    out: list[str] = []
    _write(value, out.append, item_separator, key_separator, spell_float)
    return "".join(out)


def compact(value: Any) -> str:
    """JSON without blanks, as constraints spell it.  Raises ValueError as ``dumps`` does."""
    return dumps(value, ",", ":", rust_float)


def rust_float(value: float) -> str:
    """Shortest decimal that reads back as ``value``, in plain notation from 1e-5 up to 1e16."""
    mantissa, _, exponent = repr(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))  # decimal point within digits
    digits = digits.rstrip("0") or "0"
    if digits == "0":
        text = "0.0"
    elif 0 < point <= 16:
        text = digits[:point].ljust(point, "0") + "." + (digits[point:] or "0")
    elif -5 < point <= 0:
        text = "0." + "0" * -point + digits
    else:
        text = digits[0] + ("." + digits[1:] if len(digits) > 1 else "") + f"e{point - 1:+}"
    return "-" + text if math.copysign(1.0, value) < 0 else text


def _write(value: Any, write: Callable[[str], None], item: str, key: str, spell_float: Callable[[float], str]) -> None:
    if isinstance(value, str):
        write(encode_basestring(value))
    elif value is None or isinstance(value, bool):
        write({None: "null", True: "true", False: "false"}[value])
    elif isinstance(value, int):
        write(str(value) if -(2**63) <= value < 2**64 else spell_float(_finite(value)))
    elif isinstance(value, float):
        write(spell_float(_finite(value)))
    elif isinstance(value, dict):
        write("{")
        for i, (name, entry) in enumerate(value.items()):
            write((item if i else "") + encode_basestring(name) + key)
            _write(entry, write, item, key, spell_float)
        write("}")
    elif isinstance(value, list | tuple):
        write("[")
        for i, entry in enumerate(value):
            if i:
                write(item)
            _write(entry, write, item, key, spell_float)
        write("]")
    else:
        raise ValueError(f"{type(value).__name__} is not a JSON value")


def _finite(value: float) -> float:
    """The value as a float.  Raises ValueError when it is none that JSON can hold."""
    try:
        number = float(value)
    except OverflowError:
        raise ValueError("number out of range") from None
    if not math.isfinite(number):
        raise ValueError(f"number {number} is not representable in JSON")
    return number


def _parse_int(text: str) -> int | float:
    if text == "-0":
        return -0.0
    # Long digit strings become floats: int() of them would cost quadratic time.
    value = int(text) if len(text) <= 20 else _parse_float(text)
    return value if -(2**63) <= value < 2**64 else float(value)


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("number out of range")
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"expected value, got {text}")


def _check(value: Any) -> None:
    """Raise ValueError for nesting deeper than MAX_DEPTH and for strings that are not Unicode text."""
    level = [value]
    depth = 0
    while level:
        depth += 1
        below: list[Any] = []
        for entry in level:
            if isinstance(entry, str):
                if not entry.isascii():
                    _check_text(entry)
            elif isinstance(entry, dict):
                for name in entry:
                    _check_text(name)
                below.extend(entry.values())
            elif isinstance(entry, list):
                below.extend(entry)
        if depth > MAX_DEPTH and any(isinstance(entry, dict | list) for entry in below):
            raise ValueError("recursion limit exceeded")
        level = below


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("lone surrogate in string") from None
