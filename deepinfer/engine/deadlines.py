"""Deadlines of the requests in progress; asking costs nothing until the first of them is due."""

import math


class Deadlines:
    """Request ids with the time, in seconds on the monotonic clock, at which each must have ended."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._first = math.inf  # or earlier, if that request has ended meanwhile

    def __len__(self) -> int:
        return len(self._due)

    def add(self, request_id: str, due: float) -> None:
        """`due`: seconds on the monotonic clock."""
        self._due[request_id] = due
        self._first = min(self._first, due)

    def remove(self, request_id: str) -> None:
        """The request has ended; it may be one without a deadline."""
        self._due.pop(request_id, None)

    def expired(self, now: float) -> list[str]:
        """Requests that are due, earliest first; the caller ends them, which removes them."""
        if now < self._first:
            return []
        late = sorted((due, request_id) for request_id, due in self._due.items() if due <= now)
        self._first = min((due for due in self._due.values() if due > now), default=math.inf)
        return [request_id for _, request_id in late]
