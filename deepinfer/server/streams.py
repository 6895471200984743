"""Running several sequences for one request: merged in order of arrival, cancelled when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from deepinfer.errors import EngineStoppedError
from deepinfer.server.errors import ApiError
from deepinfer.server.text_engine import Delta, Piece

logger = logging.getLogger("deepinfer.server")
_encode = msgspec.json.Encoder().encode  # several times faster than json.dumps, once a token


async def merge(
    request: Request, streams: Sequence[AsyncGenerator[Delta[Piece], None]]
) -> AsyncGenerator[tuple[int, Delta[Piece]], None]:
    """(stream number, delta) as they come.  However this ends, every stream is closed, and so its cache freed.

    Raises ClientDisconnect as soon as the connection is gone, also while nothing is being generated.
    """
    queue: asyncio.Queue[tuple[int, Delta[Piece] | Exception | None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[Delta[Piece], None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    queue.put_nowait((number, delta))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        queue.put_nowait((-1, ClientDisconnect()))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    tasks.append(asyncio.create_task(watch()))
    running = len(streams)
    try:
        while running:
            number, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(
    request: Request,
    streams: Sequence[AsyncGenerator[Delta[Piece], None]],
    add: Callable[[int, Delta[Piece]], object],
) -> None:
    """Hand every delta to `add(stream number, delta)`; for answers that are sent whole."""
    try:
        async with aclosing(merge(request, streams)) as deltas:
            async for number, delta in deltas:
                add(number, delta)
    except asyncio.CancelledError:  # the time for a graceful shutdown is over
        raise ApiError("the server is shutting down", status=503) from None


def event_stream(
    events: AsyncGenerator[dict[str, Any], None],
    named: bool = False,
    error_event: Callable[[ApiError], dict[str, Any]] = ApiError.body,
) -> StreamingResponse:
    """Server-sent events; an error after the first byte becomes an event too, in the shape of `error_event`.

    Named events carry their type as name; unnamed ones are closed by [DONE], as Chat Completions has it.
    """

    def line(event: dict[str, Any]) -> bytes:
        name = b"event: %s\n" % event["type"].encode() if named else b""
        return b"%sdata: %s\n\n" % (name, _encode(event))

    async def lines() -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            try:
                async for event in events:
                    yield line(event)
            except ClientDisconnect:
                return
            except ApiError as error:
                yield line(error_event(error))
            except EngineStoppedError:
                yield line(error_event(ApiError("the engine stopped before the answer was complete", 503)))
            except Exception:  # the status has been sent already: the client learns of it in the stream
                logger.exception("a stream broke off")
                yield line(error_event(ApiError("internal server error", 500)))
            if not named:
                yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
