"""Errors that callers may want to catch. Bad input is always a ValueError naming the field."""


class EngineStoppedError(RuntimeError):
    """The engine was closed or died of an internal error; it takes no more requests."""


class BusyError(ValueError):
    """Nothing is wrong with the request, but too much of its kind waits already.  The message names the field."""


def encodable(text: str) -> str:
    """The text with lone surrogates, which no encoding takes, written as escapes: the same text if it has none."""
    return text.encode("utf-8", "backslashreplace").decode()


def shown(value: object) -> str:
    """repr of a value for a message, in one short line whatever the value is."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print very long integers
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
