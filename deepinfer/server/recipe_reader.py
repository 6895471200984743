"""A stream of deepinfer.recipe as a Reader of text_engine: tokens in, lists of the protocol's events out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from deepinfer.outputs import TokenLogprob
from deepinfer.recipe import OutputReader
from deepinfer.server.logprobs import finite
from deepinfer.server.text_engine import Delta

Event = dict[str, Any]
Events = Sequence[Event | bytes]  # bytes: a line of the event stream, ready to be sent


class RecipeStream(Protocol):
    """What ChatStream, ResponsesStream and MessagesStream have in common."""

    reader: OutputReader

    def push_tokens(self, token_ids: list[int], logprobs: Any = None) -> list[Event]: ...

    def finish(self, engine_reason: str = "stop") -> list[Event]: ...


Stream = TypeVar("Stream", bound=RecipeStream)


class RecipeReader(Generic[Stream]):
    """One sequence: what came so far, and the events it became."""

    def __init__(self, stream: Stream):
        self.stream = stream
        self.token_ids: list[int] = []
        self.stop_reason: int | str | None = None
        self.finish_reason: str | None = None  # the engine's
        self.prompt_logprobs: list[TokenLogprob | None] | None = None

    def push(self, token_id: int, logprob: TokenLogprob | None) -> tuple[Events, str | None]:
        values = None if logprob is None else [(finite(logprob.logprob), [(i, finite(lp)) for i, lp in logprob.top])]
        return self.stream.push_tokens([token_id], values), self.stream.reader.parser.stop_string

    def finish(self, reason: str) -> Events:
        return self.stream.finish(reason)

    def add(self, delta: Delta[Events]) -> Events:
        """Take a delta in; the events to send, none while everything is held back."""
        self.token_ids += delta.token_ids
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.stop_reason, self.finish_reason = delta.stop_reason, delta.finish_reason
        return [event for events in delta.pieces for event in events]
