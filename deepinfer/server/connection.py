"""Connections that do not waste the server's time: late or endless request headers, and what the log says of them."""

from __future__ import annotations

import asyncio
import logging
import time

from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.flow_control import FlowControl as FlowControl

# In the scope: whether the connection takes more; and `send` of the server itself, for what follows an answer's start.
FLOW, DIRECT_SEND = "deepinfer.flow", "deepinfer.send"
WRITE_SECONDS = 60.0  # for a client to take some of its answer, when the buffers are full
HEADER_SECONDS = 20.0  # for the headers of a request to arrive; its body: see body.py
MAX_HEADER_BYTES = 64 * 1024
WARNING_SECONDS = 60.0  # between two equal warnings about bad requests


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Uvicorn's protocol, patient but not endlessly: it waits HEADER_SECONDS for headers of MAX_HEADER_BYTES.

    A client that takes nothing of its answer for WRITE_SECONDS is cut off: its requests would hold their places.
    """

    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._stop_waiting()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None:  # else the client asked for another protocol
            self.scope[FLOW], self.scope[DIRECT_SEND] = self.flow, self.cycle.send

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_waiting()
        super().resume_writing()

    def _stop_waiting(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering():
            self._stop()
            return
        if self._timer is None and not self.transport.is_closing():
            self._start()
        if self.cycle is None or not self.cycle.more_body:  # else the rest of a body that was refused
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response("The request headers are too large.")

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self._close)

    def _stop(self) -> None:
        self._header_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self._timer = None
        if not self._answering():
            self.transport.close()


class Seldom(logging.Filter):
    """Lets each text of a warning through once in WARNING_SECONDS: anybody can send bad requests in any number."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING or record.args:
            return True
        now = time.monotonic()
        if now - self._last.get(record.msg, -WARNING_SECONDS) < WARNING_SECONDS:
            return False
        self._last[record.msg] = now
        return True
