"""Outputs on their way from an engine to the one who waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial

from deepinfer.outputs import RequestOutput

News = RequestOutput | Exception
Deliver = Callable[[News], None]
Leave = Callable[[], None]


class Mailbox:
    """News of some requests, told apart by number, for one consumer: it wakes up once for all that came meanwhile.

    Outputs of one request that the consumer is too slow for are merged. It belongs to one event loop.
    """

    __slots__ = ("_news", "_mergeable", "_waiter")

    def __init__(self) -> None:
        self._news: list[tuple[int, News]] = []
        self._mergeable: dict[int, RequestOutput] = {}
        self._waiter: asyncio.Future[None] | None = None

    def put(self, number: int, news: News) -> None:
        """News of request `number`, merged with those that wait; an error comes behind them."""
        earlier = self._mergeable.get(number)
        if isinstance(news, Exception):
            self._news.append((number, news))
        elif earlier is not None:
            earlier.merge(news)
        else:
            self._mergeable[number] = news
            self._news.append((number, news))
        self.wake()

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def wake(self) -> None:
        """Let `take` return what there is, also nothing."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[tuple[int, News]]:
        """All that has come, in order; waits for something, or `wake`, if there is nothing."""
        if not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        news, self._news = self._news, []
        self._mergeable.clear()
        return news


async def outputs_of(submit: Callable[[Deliver], Leave]) -> AsyncGenerator[RequestOutput, None]:
    """Outputs of the request that `submit(deliver)` queues, which returns how to leave it, until one is finished.

    The request is queued on the first `anext`, and left if the generator is closed before. Raises what is delivered.
    """
    mailbox = Mailbox()
    leave = submit(partial(mailbox.put, 0))
    ended = False
    try:
        while not ended:
            for _, news in await mailbox.take():
                ended = isinstance(news, Exception) or news.finished
                if isinstance(news, Exception):
                    raise news
                yield news
    finally:
        if not ended:
            leave()
