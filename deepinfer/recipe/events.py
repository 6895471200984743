"""What the stream parser says about the output, in order."""

import secrets
import string
from dataclasses import dataclass
from typing import Any

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ReasoningText:
    text: str
    logprobs: tuple[Any, ...] = ()


@dataclass(frozen=True)
class AnswerText:
    text: str
    logprobs: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ToolCallStart:
    """Call number ``index`` of the output begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of the arguments' JSON text."""

    index: int
    text: str


Event = ReasoningText | AnswerText | ToolCallStart | ToolCallArguments


def new_call_id(index: int, empty_reasoning: bool) -> str:
    """``call_NN_`` and 24 random characters; ``ET_`` marks calls of a turn whose reasoning was empty."""
    letters = "".join(secrets.choice(_LETTERS) for _ in range(20))
    return f"call_{index:02}_{'ET_' if empty_reasoning else ''}{letters}{secrets.randbelow(10000):04}"
