"""Running several sequences for one request: merged in order of arrival, cancelled when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from deepinfer.engine.mailbox import Mailbox
from deepinfer.errors import EngineStoppedError
from deepinfer.server.errors import ApiError
from deepinfer.server.middleware import DIRECT_SEND
from deepinfer.server.sequences import RunningSequence
from deepinfer.server.text_engine import Delta, Piece

logger = logging.getLogger("deepinfer.server")
_encode = msgspec.json.Encoder().encode  # several times faster than json.dumps, once a token


async def merge(
    request: Request | None, sequences: Sequence[RunningSequence[Piece]]
) -> AsyncGenerator[tuple[int, Delta[Piece]], None]:
    """Start the sequences: (number, delta) as they come.  However this ends, all are left, and so their cache freed.

    Without a `request` no client waits.  Raises ClientDisconnect as soon as the connection is gone, also while nothing
    is being generated.
    """
    mailbox = Mailbox()
    tasks = []
    if request is not None:
        tasks.append(asyncio.create_task(_watch(request, mailbox)))
    running = len(sequences)
    try:
        for number, sequence in enumerate(sequences):
            deliver = partial(mailbox.put, number)
            if sequence.must_wait:
                tasks.append(asyncio.create_task(sequence.wait_and_start(deliver)))
            else:
                sequence.start(deliver)
        while running:
            for number, news in await mailbox.take():
                if number < 0:
                    raise ClientDisconnect
                if sequences[number].ended:
                    continue  # at a stop string, which the engine did not know of yet
                delta = sequences[number].read(news)
                running -= delta.finish_reason is not None
                yield number, delta
    finally:
        for sequence in sequences:
            sequence.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(request: Request, mailbox: Mailbox) -> None:
    """Put a letter from number -1 into the mailbox when the client goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    mailbox.put(-1, ClientDisconnect())


async def collect(
    request: Request,
    sequences: Sequence[RunningSequence[Piece]],
    add: Callable[[int, Delta[Piece]], object],
) -> None:
    """Hand every delta to `add(stream number, delta)`; for answers that are sent whole."""
    try:
        async with aclosing(merge(request, sequences)) as deltas:
            async for number, delta in deltas:
                add(number, delta)
    except asyncio.CancelledError:  # the time for a graceful shutdown is over
        raise ApiError("the server is shutting down", status=503) from None


class EventStream(StreamingResponse):
    """Server-sent events.  After its start the answer goes straight to the connection: middleware looks at starts only.

    It does not listen for the client to go away, as StreamingResponse does: `merge` does.
    """

    def __init__(
        self, events: AsyncGenerator[dict[str, Any], None], named: bool, error_event: Callable[[ApiError], dict]
    ) -> None:
        super().__init__((), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.events, self.named, self.error_event = events, named, error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            write = scope.get(DIRECT_SEND, send)
            try:
                async for event in events:
                    await write({"type": "http.response.body", "body": self.line(event), "more_body": True})
            except ClientDisconnect:
                return
            except Exception as error:  # the status has been sent already: the client learns of it in the stream
                line = self.line(self.error_event(_as_api_error(error)))
                await write({"type": "http.response.body", "body": line, "more_body": True})
        last = b"" if self.named else b"data: [DONE]\n\n"
        await write({"type": "http.response.body", "body": last, "more_body": False})

    def line(self, event: dict[str, Any]) -> bytes:
        if self.named:
            return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), _encode(event))
        return b"data: %s\n\n" % _encode(event)


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineStoppedError):
        return ApiError("the engine stopped before the answer was complete", 503)
    logger.error("a stream broke off", exc_info=error)
    return ApiError("internal server error", 500)


def event_stream(
    events: AsyncGenerator[dict[str, Any], None],
    named: bool = False,
    error_event: Callable[[ApiError], dict[str, Any]] = ApiError.body,
) -> EventStream:
    """Server-sent events; an error after the first byte becomes an event too, in the shape of `error_event`.

    Named events carry their type as name; unnamed ones are closed by [DONE], as Chat Completions has it.
    """
    return EventStream(events, named, error_event)
