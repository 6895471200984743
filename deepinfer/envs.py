"""Every DEEPINFER_* environment variable, typed, in one table. Read when used, so tests can change them."""

import os
from collections.abc import Callable
from typing import Any


def _bool(text: str) -> bool:
    values = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in values:
        raise ValueError(f"must be one of {', '.join(values)}")
    return values[text.lower()]


# name -> (parser, default, meaning)
VARIABLES: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "DEEPINFER_DEBUG": (_bool, False, "show the traceback of an error on the command line"),
    "DEEPINFER_API_KEY": (str, None, "key that clients of `deepinfer serve` must send, like --api-key"),
    "DEEPINFER_CHECK_INTEGRITY": (_bool, False, "check queues, blocks and slots after every step (slow)"),
}


def get(name: str) -> Any:
    """Value of one variable of the table. Raises ValueError naming it when the text cannot be parsed."""
    parse, default, _ = VARIABLES[name]
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"environment variable {name}={text!r}: {error}") from None
