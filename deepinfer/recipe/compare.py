"""Comparing two JSON values, naming the first place where they differ."""

from typing import Any

from deepinfer.recipe.known_differences import Difference


def first_difference(expected: Any, actual: Any, known: Difference, path: str = "") -> str | None:
    """The first place where two JSON values differ, or None."""
    if path in known.fields:
        return None
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in [*expected, *(key for key in actual if key not in expected)]:
            where = f"{path}.{key}" if path else key
            if key not in actual or key not in expected:
                if where in known.fields:
                    continue
                return f"{where}: {'missing' if key in expected else 'unexpected'}"
            difference = first_difference(expected[key], actual[key], known, where)
            if difference:
                return difference
        return None
    if isinstance(expected, list) and isinstance(actual, list):
        for i, (left, right) in enumerate(zip(expected, actual, strict=False)):
            difference = first_difference(left, right, known, f"{path}[{i}]")
            if difference:
                return difference
        return None if len(expected) == len(actual) else f"{path}: length {len(actual)}, expected {len(expected)}"
    if expected == actual and isinstance(expected, bool) == isinstance(actual, bool):
        return None
    return f"{path}: {_shown(actual, expected)}, expected {_shown(expected, actual)}"


def _shown(value: Any, other: Any) -> str:
    """A value, of long text only the surroundings of the first difference."""
    if not (isinstance(value, str) and isinstance(other, str)):
        return repr(value)
    start = next((i for i, (a, b) in enumerate(zip(value, other, strict=False)) if a != b), min(len(value), len(other)))
    return repr(value[max(0, start - 20) : start + 40])
