"""A small HTTP server that streams made-up answers with known delays and faults, and notes when it did what.

It runs in a thread of this process, so its stamps (`perf_counter`) can be compared with the client's.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from deepinfer.bench.serve_workload import Request


@dataclass
class Seen:
    """One request as the server saw it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    received: float
    chunks: list[float] = field(default_factory=list)  # when each chunk with output was written


@dataclass
class SseServer:
    """Answers of `max_tokens` tokens: the first chunk after `first_delay` seconds, the others `gap` apart.

    `faults[i]` is the fault of request i (in order of arrival), by default `fault`.  Nothing is answered before
    `hold_until` requests are in flight.
    """

    first_delay: float = 0.0
    gap: float = 0.0
    hold_until: int = 1
    tokens_per_chunk: int = 1
    fault: str = ""
    faults: dict[int, str] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    in_flight: int = 0
    peak: int = 0
    connections: int = 0
    port: int = 0
    open: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:  # one connection, many requests
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = head[0].split()
                if method == "GET":
                    if self.fault == "locked":
                        respond(writer, 401, {"error": {"message": "wrong key"}})
                    else:
                        respond(writer, 200, {"data": [{"id": "made-up"}]})
                    continue
                seen = Seen(path, headers, json.loads(raw), perf_counter())
                fault = self.faults.get(len(self.seen), self.fault)
                self.seen.append(seen)
                self.in_flight += 1
                self.peak = max(self.peak, self.in_flight)
                if self.in_flight >= self.hold_until:
                    self.open.set()
                try:
                    await self.open.wait()
                    await self.answer(writer, seen, fault)
                finally:
                    self.in_flight -= 1
                if fault == "cut":
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, writer: asyncio.StreamWriter, seen: Seen, fault: str) -> None:
        if fault == "busy":
            return respond(writer, 429, {"error": {"message": "too many requests", "type": "rate_limit"}})
        if fault == "html":
            return respond(writer, 502, "<h1>bad gateway</h1>")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        chat = seen.path.endswith("/chat/completions")
        tokens = seen.body.get("max_tokens") or seen.body["max_completion_tokens"]
        if chat:
            await self.event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, fault)
        sent = 0
        while sent < tokens:
            await asyncio.sleep(self.gap if sent else self.first_delay)
            if fault == "hang":
                await asyncio.sleep(60)
            if fault == "cut" and sent:
                return
            if fault == "error" and sent:
                await self.event(writer, {"error": {"message": "the engine stopped", "code": 500}}, fault)
                break
            if fault == "garbage":
                await self.send(writer, b"data: {nonsense\n\n")
                break
            sent = min(tokens, sent + self.tokens_per_chunk)
            text = " word" * self.tokens_per_chunk
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            choice["finish_reason"] = "length" if sent == tokens and fault != "unfinished" else None
            seen.chunks.append(perf_counter())
            await self.event(writer, {"choices": [choice], "usage": None}, fault)
        if fault != "no usage":
            usage = {"prompt_tokens": 7, "completion_tokens": sent, "prompt_tokens_details": {"cached_tokens": 3}}
            await self.event(writer, {"choices": [], "usage": usage}, fault)
        if fault != "unfinished":
            await self.send(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def event(self, writer: asyncio.StreamWriter, body: dict[str, Any], fault: str) -> None:
        data = b": a comment\r\nevent: message\r\ndata: " + json.dumps(body).encode() + b"\r\n\r\n"
        if fault != "fragments":
            return await self.send(writer, data)
        for start in range(0, len(data), 5):  # cut within words, and between CR and LF
            await self.send(writer, data[start : start + 5])

    async def send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await writer.drain()


def respond(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n\r\n%s" % (status, len(raw), raw))


@contextmanager
def running(server: SseServer) -> Iterator[SseServer]:
    """`server` listening on a free port, in a thread."""
    started = threading.Event()
    stop: asyncio.Event | None = None
    loop = asyncio.new_event_loop()

    async def listen() -> None:
        nonlocal stop
        stop = asyncio.Event()
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, backlog=2048)
        server.port = listener.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        listener.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=loop.run_until_complete, args=(listen(),), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        assert stop is not None
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


def some_requests(count: int, output_len: int = 4) -> list[Request]:
    return [Request(f"prompt {number}", output_len) for number in range(count)]
