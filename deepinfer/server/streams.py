"""Running the sequences of one request: their news read as they come, all cancelled when the client goes away.

News are read in the callback that brings them, all those of a step in a row; what they become is written after that,
one write a connection. So a token costs no switch between tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from deepinfer.engine.mailbox import Mailbox, News
from deepinfer.errors import EngineStoppedError
from deepinfer.outputs import RequestOutput
from deepinfer.server.body import beside_loop
from deepinfer.server.connection import DIRECT_SEND, FLOW, FlowControl
from deepinfer.server.errors import ApiError
from deepinfer.server.recipe_reader import Event, Events
from deepinfer.server.sequences import RunningSequence
from deepinfer.server.state import server_state
from deepinfer.server.text_engine import Delta

logger = logging.getLogger("deepinfer.server")
encode_json = msgspec.json.Encoder().encode  # several times faster than json.dumps, once a token


class Answer:
    """What one protocol says of a request's sequences, event by event."""

    def begin(self) -> Events:
        """Events before the first token."""
        return []

    def add(self, number: int, delta: Delta[Any]) -> Events:
        """Take in news of a sequence; the events to send, none while everything is held back."""
        raise NotImplementedError

    def end(self) -> Events:
        """Events after the last token."""
        return []

    def fail(self, error: ApiError) -> Events:
        """Events in place of the rest of the answer: its status has been sent already."""
        return [error.body()]

    def close(self) -> None:
        """However it ended, also when the client has gone away."""


class Sink(Protocol):
    """Where an answer goes that is sent while it is made."""

    @property
    def is_full(self) -> bool:
        """Whether the client must take some of it first."""
        ...

    async def drain(self) -> None:
        """Send what there is, and wait until the client takes more."""
        ...

    async def take_aside(self, number: int, delta: Delta[Any]) -> None:
        """Take in news that make a long event, which is made in a worker thread."""
        ...


class Generation:
    """The sequences of one request while they run: `take(number, delta)` is called with their news, in order.

    News that come while the sink is full, or makes a long event, wait, merged to one of each sequence; so do those of
    fewer than `interval` tokens, but for the first. `run` once.
    """

    def __init__(
        self,
        sequences: Sequence[RunningSequence[Any]],
        take: Callable[[int, Delta[Any]], object],
        sink: Sink | None = None,
        interval: int = 1,
    ) -> None:
        self._sequences, self._take, self._sink, self._interval = sequences, take, sink, interval
        self._early: dict[int, RequestOutput | None] = {}  # what waits for more tokens; None: only the first did not
        self._waiting = Mailbox()
        self._is_catching_up = False
        self._num_running = len(sequences)
        self._error: Exception | None = None

    async def run(self, request: Request | None) -> None:
        """Until all sequences have ended. However this ends, all are left, and so their cache is freed.

        Without a `request` no client waits. Raises ClientDisconnect as soon as the connection is gone, also while
        nothing is being generated, what went wrong in a sequence or in `take`, and ApiError when the server ends.
        """
        tasks = [] if request is None else [asyncio.create_task(self._watch(request))]
        try:
            for number, sequence in enumerate(self._sequences):
                deliver = partial(self._deliver, number)
                if sequence.must_wait:
                    tasks.append(asyncio.create_task(sequence.wait_and_start(deliver)))
                else:
                    sequence.start(deliver)
            while self._num_running and self._error is None:
                await self._catch_up(await self._waiting.take())
            if self._error is not None:
                raise self._error
        except asyncio.CancelledError:  # the time for a graceful shutdown is over
            raise ApiError("the server is shutting down", status=503) from None
        finally:
            for sequence in self._sequences:
                sequence.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _catch_up(self, letters: list[tuple[int, News]]) -> None:
        if letters and self._sink is not None:
            await self._sink.drain()
        for number, news in letters:
            if self._sink is not None and _is_long(news):
                await self._read_aside(self._sink, number, news)
            else:
                self._read(number, news)
        self._is_catching_up = self._waiting.has_news  # those that came during the drain are next

    def _deliver(self, number: int, news: News) -> None:
        if self._interval > 1:
            due = self._due(number, news)
            if due is None:
                return
            news = due
        must_wait = self._sink is not None and (self._sink.is_full or _is_long(news))
        if self._is_catching_up or must_wait:
            self._is_catching_up = True
            self._waiting.put(number, news)
        else:
            self._read(number, news)

    def _due(self, number: int, news: News) -> News | None:
        """The news together with those that waited; None if there are too few tokens yet."""
        if isinstance(news, Exception):
            return news
        is_first = number not in self._early
        early = self._early.get(number)
        if early is None:
            early = news
        else:
            early.merge(news)
        is_due = is_first or early.finished or sum(len(o.token_ids) for o in early.outputs) >= self._interval
        self._early[number] = None if is_due else early
        return early if is_due else None

    def _read(self, number: int, news: News) -> None:
        sequence = self._sequences[number]
        if sequence.ended:
            return  # at a stop string, which the engine did not know of yet
        try:
            delta = sequence.read(news)
            self._take(number, delta)
        except Exception as error:
            self._end(error)
        else:
            self._count_down(delta)

    async def _read_aside(self, sink: Sink, number: int, news: News) -> None:
        sequence = self._sequences[number]
        if sequence.ended:
            return
        try:
            delta = sequence.read(news)
            await sink.take_aside(number, delta)
        except Exception as error:
            self._end(error)
        else:
            self._count_down(delta)

    def _count_down(self, delta: Delta[Any]) -> None:
        if delta.finish_reason is not None:
            self._num_running -= 1
            if not self._num_running:
                self._waiting.wake()

    async def _watch(self, request: Request) -> None:
        """End it all when the client goes away."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._end(ClientDisconnect())

    def _end(self, error: Exception) -> None:
        self._error = self._error or error
        self._waiting.wake()


async def collect(
    request: Request | None,
    sequences: Sequence[RunningSequence[Any]],
    take: Callable[[int, Delta[Any]], object],
) -> None:
    """Hand every delta to `take(number, delta)`; for answers that are sent whole."""
    await Generation(sequences, take).run(request)


class EventStream(StreamingResponse):
    """Server-sent events. After its start the answer goes straight to the connection: middleware looks at starts only.

    Named events carry their type as name; unnamed ones are closed by [DONE], as Chat Completions has it. An error after
    the first byte becomes an event, too. It does not listen for the client to go away, as StreamingResponse does:
    Generation does.
    """

    def __init__(
        self,
        request: Request,
        sequences: Sequence[RunningSequence[Any]],
        answer: Answer,
        named: bool = False,
        interval: int | None = None,
    ) -> None:
        """`interval`: tokens of a sequence that an event waits for; None: what the server was told."""
        super().__init__((), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.request, self.answer, self.named = request, answer, named
        interval = interval or server_state(request).stream_interval
        self._generation = Generation(sequences, self._take, self, interval)
        self._flow: FlowControl | None = request.scope.get(FLOW)
        self._lines: list[bytes] = []  # to be written
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = scope.get(DIRECT_SEND, send)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                self._add(self.answer.begin())
                await self._generation.run(self.request)
                self._add(self.answer.end())
            except ClientDisconnect:
                return
            except Exception as error:
                self._add(self.answer.fail(as_api_error(error)))
        finally:
            self.answer.close()
        lines, self._lines = self._lines, []
        await self._send(_body(lines if self.named else [*lines, b"data: [DONE]\n\n"], more=False))

    @property
    def is_full(self) -> bool:
        return self._flow is None or self._flow.write_paused

    async def drain(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            await self._send(_body(lines))
        if self._flow is not None:
            await self._flow.drain()

    async def take_aside(self, number: int, delta: Delta[Any]) -> None:
        def lines() -> list[bytes]:
            return [line_of(event, self.named) for event in self.answer.add(number, delta)]

        self._add_lines(await beside_loop(self.request, lines, heavy=True))

    def _take(self, number: int, delta: Delta[Any]) -> None:
        self._add(self.answer.add(number, delta))

    def _add(self, events: Events) -> None:
        self._add_lines([line_of(event, self.named) for event in events])

    def _add_lines(self, lines: list[bytes]) -> None:
        """To be written after all news of this step have been read."""
        if lines:
            if not self._lines:
                asyncio.get_running_loop().call_soon(self._write)
            self._lines += lines

    def _write(self) -> None:
        """Unless the connection is full: then the rest is up to `drain`, which more news will call."""
        if self._lines and not self.is_full:
            lines, self._lines = self._lines, []
            _run_at_once(self._send(_body(lines)))


async def whole_answer(request: Request, body: Callable[[], Any], is_long: bool) -> Response:
    """An answer in one piece. A long one is made in a worker thread, so that the others' streams go on."""
    content = await beside_loop(request, lambda: encode_json(body()), heavy=is_long)
    return Response(content, media_type="application/json")


def line_of(event: Event | bytes, named: bool = False) -> bytes:
    """An event as the stream carries it; named ones say their type."""
    if isinstance(event, bytes):
        return event
    if named:
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), encode_json(event))
    return b"data: %s\n\n" % encode_json(event)


def _is_long(news: News) -> bool:
    """Whether what is said of them may be megabytes: an entry a token of a prompt."""
    return isinstance(news, RequestOutput) and news.prompt_logprobs is not None


def _body(lines: list[bytes], more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"".join(lines), "more_body": more}


def _run_at_once(sending: Awaitable[None]) -> None:
    """Run what has nothing to wait for: `send`, when the connection is not full."""
    steps = sending.__await__()
    try:
        next(steps)
    except StopIteration:
        return
    raise RuntimeError("a write had to wait although the connection took more")


def as_api_error(error: Exception) -> ApiError:
    """What to tell the client of an error while it generates; the log hears of one that is nobody's wish."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineStoppedError):
        return ApiError("the engine stopped before the answer was complete", 503)
    logger.error("an answer broke off", exc_info=error)
    return ApiError("internal server error", 500)
