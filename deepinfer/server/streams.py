"""Running several sequences for one request: merged in order of arrival, cancelled when the client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from deepinfer.server.errors import ApiError, error_body
from deepinfer.server.text_engine import Delta, Piece

logger = logging.getLogger("deepinfer.server")


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


def event_stream(events: AsyncGenerator[dict[str, Any], None]) -> StreamingResponse:
    """Server-sent events, closed by [DONE]; an error after the first byte becomes an event of OpenAI's error shape."""

    async def lines() -> AsyncGenerator[str, None]:
        async with aclosing(events):
            try:
                async for event in events:
                    yield f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"
            except ClientDisconnect:
                return
            except ApiError as error:
                yield f"data: {json.dumps(error.body())}\n\n"
            except Exception:  # the status has been sent already: the client learns of it in the stream
                logger.exception("a stream broke off")
                yield f"data: {json.dumps(error_body('internal server error', 500))}\n\n"
            yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
