"""Requests in progress, so that they can be aborted from outside by the names their clients know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace


@dataclass
class RequestFacts:
    """What the log says of a request that generates; `ttft` in seconds, None before the first token."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft: float | None = None


@dataclass(frozen=True)
class Ticket:
    """Who asked (`owner`: the API key's number, "" without keys), and when, on the monotonic clock, before tokenising.

    `names` are the X-Request-Id and the id of the answer.
    """

    owner: str
    request_id: str
    answer_id: str
    arrival: float
    facts: RequestFacts = field(default_factory=RequestFacts)

    def renamed(self, name: str | None) -> Ticket:
        """The same under the name that the client gave in the body, which the answer's id then ends with."""
        if name is None:
            return self
        return replace(self, request_id=name, answer_id=f"{self.answer_id.partition('-')[0]}-{name}")

    @property
    def names(self) -> tuple[str, str]:
        return self.request_id, self.answer_id


class RunningRequests:
    """Sequences that the engine works on, by the names of their request.  Used in the server's event loop only."""

    def __init__(self, abort: Callable[[str], None]):
        """`abort(engine_id)` ends a sequence in the engine."""
        self._abort = abort
        self._sequences: dict[str, Ticket] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, engine_id: str, ticket: Ticket) -> None:
        self._sequences[engine_id] = ticket

    def remove(self, engine_id: str) -> None:
        self._sequences.pop(engine_id, None)

    @property
    def engine_ids(self) -> list[str]:
        return list(self._sequences)

    def abort(self, owner: str, name: str | None = None) -> set[str]:
        """Abort the owner's requests of this name, or all of them.  Request IDs of what was aborted."""
        aborted = set()
        for engine_id, ticket in self._sequences.items():
            if ticket.owner == owner and (name is None or name in ticket.names):
                self._abort(engine_id)
                aborted.add(ticket.request_id)
        return aborted
