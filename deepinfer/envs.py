"""Every DEEPINFER_* environment variable, typed, in one table. Read when used, so tests can change them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _bool(text: str) -> bool:
    values = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in values:
        raise ValueError(f"must be one of {', '.join(values)}")
    return values[text.lower()]


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return parse


# name -> (parser, default, meaning)
VARIABLES: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "DEEPINFER_API_KEY": (str, None, "key that clients of the server must send"),
    "DEEPINFER_CACHE_DIR": (
        Path,
        None,
        "where compiled kernels are kept; default: deepinfer in the user's cache folder",
    ),
    "DEEPINFER_CHECK_INTEGRITY": (_bool, False, "check queues, blocks and slots after every step (slow)"),
    "DEEPINFER_DEBUG": (_bool, False, "show the traceback of an error on the command line"),
    "DEEPINFER_KERNELS": (
        _choice("auto", "reference"),
        "auto",
        "auto takes the fastest kernels there are, reference the PyTorch ones",
    ),
    "DEEPINFER_MAX_BACKTRACKING_TOKENS": (
        int,
        None,
        "tokens of a sequence that speculation may take back; default: what the model's draft head needs",
    ),
    "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": (
        int,
        None,
        "last prompt tokens that run the decoder layers; at least window + backtracking tokens",
    ),
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": (
        _choice("off", "mask", "compact"),
        "off",
        "whether prefill runs only those: mask hides the other rows, compact drops them",
    ),
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
