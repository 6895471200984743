"""Errors that callers may want to catch. Bad input is always a ValueError naming the field."""


class EngineStoppedError(RuntimeError):
    """The engine was closed or died of an internal error; it takes no more requests."""


def shown(value: object) -> str:
    """repr of a value for a message, in one short line whatever the value is."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print very long integers
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
