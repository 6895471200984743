"""Responses kept for `previous_response_id` and GET, in memory: bounded in number, bytes and age."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
DEFAULT_TTL = 24 * 3600.0  # seconds


@dataclass
class StoredResponse:
    """A response as it stands, and the input items that led to it, those of earlier responses included."""

    key: tuple[str, str]  # owner, response id
    response: Json
    items: list[Json]
    expires: float
    size: int = 0  # bytes of JSON
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def context(self) -> list[Json]:
        """Input items of a request that goes on from here."""
        return [*self.items, *self.response["output"]]


class ResponseStore:
    """Each owner sees its own responses only.  The oldest go first when a limit is passed; `ttl` 0 keeps nothing."""

    def __init__(
        self,
        ttl: float = DEFAULT_TTL,
        max_entries: int = 10_000,
        max_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.ttl, self.max_entries, self.max_bytes, self.clock = ttl, max_entries, max_bytes, clock
        self.bytes = 0
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, owner: str, response: Json, items: list[Json]) -> StoredResponse:
        """Keep a response that begins now."""
        entry = StoredResponse((owner, response["id"]), response, items, self.clock() + self.ttl)
        self._entries[entry.key] = entry
        self._resize(entry)
        return entry

    def finish(self, entry: StoredResponse, response: Json) -> None:
        """The response has ended like this."""
        entry.response = response
        entry.ended.set()
        if entry.key in self._entries:
            self._resize(entry)

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """None if it is not stored, has been forgotten, or belongs to another key."""
        self._evict()
        return self._entries.get((owner, response_id))

    def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response; -> whether it was there."""
        self._evict()
        entry = self._entries.pop((owner, response_id), None)
        if entry is not None:
            self.bytes -= entry.size
        return entry is not None

    def _resize(self, entry: StoredResponse) -> None:
        size = len(json.dumps([entry.items, entry.response]))
        self.bytes += size - entry.size
        entry.size = size
        self._evict()

    def _evict(self) -> None:
        now = self.clock()
        while self._entries:
            oldest = next(iter(self._entries.values()))
            full = len(self._entries) > self.max_entries or self.bytes > self.max_bytes
            if oldest.expires > now and not full:
                break
            self._entries.popitem(last=False)
            self.bytes -= oldest.size
