"""Pausing: a gate before the engine, at which new sequences wait until it is opened again."""

from __future__ import annotations

import asyncio


class Gate:
    """Open at first.  Used in the server's event loop only."""

    def __init__(self) -> None:
        self.is_closed = False
        self._waiting: dict[str, asyncio.Event] = {}
        self._turned_away: set[str] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        self.is_closed = True

    def open(self) -> None:
        self.is_closed = False
        for event in self._waiting.values():
            event.set()

    async def passed(self, engine_id: str) -> bool:
        """Wait for the gate to be open.  False if the sequence was turned away meanwhile: it must not run."""
        try:
            while self.is_closed and engine_id not in self._turned_away:
                event = self._waiting[engine_id] = asyncio.Event()
                await event.wait()
            return engine_id not in self._turned_away
        finally:
            self._waiting.pop(engine_id, None)
            self._turned_away.discard(engine_id)

    def turn_away(self, engine_id: str) -> bool:
        """Let a sequence that waits here go without running.  False if it does not wait here."""
        if engine_id not in self._waiting:
            return False
        self._turned_away.add(engine_id)
        self._waiting[engine_id].set()
        return True
