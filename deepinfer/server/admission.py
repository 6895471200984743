"""Back-pressure: who is let in.  Above a limit the answer is 429 with Retry-After, never a growing queue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

from deepinfer.server.errors import ApiError
from deepinfer.server.metrics import Metrics
from deepinfer.server.running import Ticket

QUEUE_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Limits:
    """None is no limit.

    Attributes:
        max_sequences: once this many sequences run or wait, further requests are refused.  One that is let in may
            exceed it by its own n, so that every valid request is served sooner or later.
        max_concurrency_per_key: most requests of one API key at a time; without keys, of everybody together.
        rate_limit: requests a minute of one API key, and as many at once after a pause.
        max_body_bytes: most bytes of one request body; beyond: 413.
    """

    max_sequences: int | None = None
    max_concurrency_per_key: int | None = None
    rate_limit: float | None = None
    max_body_bytes: int = 8 << 20


class Place:
    """One sequence that was let in.  It counts until `leave`, or until nobody holds it: its stream never started."""

    __slots__ = ("ticket", "_all", "__weakref__")

    def __init__(self, ticket: Ticket, places: WeakSet[Place]):
        self.ticket, self._all = ticket, places
        places.add(self)

    def leave(self) -> None:
        self._all.discard(self)


class Admission:
    """Used in the server's event loop only.  `clock` gives seconds, monotonic."""

    def __init__(self, limits: Limits, metrics: Metrics, clock: Callable[[], float] = time.monotonic):
        self.limits, self._metrics, self._clock = limits, metrics, clock
        self._places: WeakSet[Place] = WeakSet()
        self._allowances: dict[str, tuple[float, float]] = {}  # owner -> requests left, as of when

    def __len__(self) -> int:
        return len(self._places)

    def check_queue(self) -> None:
        """ApiError 429 if the queue is full; costs next to nothing, so ask before reading a request."""
        limit = self.limits.max_sequences
        if limit is not None and len(self._places) >= limit:
            raise self._refusal("queue_full", "the server's queue is full", QUEUE_RETRY_SECONDS)

    def admit(self, ticket: Ticket, num_sequences: int) -> list[Place]:
        """Places for the sequences of a request.  Raises ApiError 429 if a limit is reached."""
        self.check_queue()
        most = self.limits.max_concurrency_per_key
        if most is not None:
            # By the ticket itself: a client may give all its requests the same names.
            running = {id(place.ticket) for place in self._places if place.ticket.owner == ticket.owner}
            if len(running) >= most:
                message = f"{most} requests of this API key are in progress already, which is the limit"
                raise self._refusal("key_concurrency", message, QUEUE_RETRY_SECONDS)
        self._spend(ticket.owner)
        return [Place(ticket, self._places) for _ in range(num_sequences)]

    def _spend(self, owner: str) -> None:
        """Take one request of the owner's allowance, which refills steadily."""
        rate = self.limits.rate_limit
        if rate is None:
            return
        now, size = self._clock(), max(1.0, rate)
        left, since = self._allowances.get(owner, (size, now))
        left = min(size, left + (now - since) * rate / 60)
        self._allowances[owner] = (left, now)
        if left < 1:
            raise self._refusal("key_rate", f"the limit is {rate:g} requests a minute", (1 - left) * 60 / rate)
        self._allowances[owner] = (left - 1, now)

    def _refusal(self, reason: str, message: str, wait: float) -> ApiError:
        self._metrics.reject(reason)
        return ApiError(message, 429, code=reason, retry_after=math.ceil(wait))
