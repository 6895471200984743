"""Messages that wait for an answer, known by a number that is never used twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Questions:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next_number = 0

    async def ask(self, send: Callable[[int], None], leave: Callable[[int], None] = lambda number: None) -> Any:
        """Call `send(number)` and wait for the answer to this number. Raises what it is answered with, if an error.

        `leave(number)` is called if whoever asks is cancelled.
        """
        number = self._next_number
        self._next_number += 1
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            send(number)
            return await answer
        except asyncio.CancelledError:
            leave(number)
            raise
        finally:
            del self._waiting[number]

    def answer(self, number: int, value: Any) -> None:
        """Nobody may be waiting any more. An exception is raised where the question was asked."""
        asked = self._waiting.get(number)
        if asked is None or asked.done():
            return
        if isinstance(value, Exception):
            asked.set_exception(value)
        else:
            asked.set_result(value)

    def fail_all(self, error: Exception) -> None:
        """Whoever waits gets this error."""
        for number in self._waiting:
            self.answer(number, error)
