"""Errors that callers may want to catch. Bad input is always a ValueError naming the field."""


class EngineStoppedError(RuntimeError):
    """The engine was closed or died of an internal error; it takes no more requests."""
