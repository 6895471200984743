"""The load generator: streams requests to an OpenAI-compatible server and stamps every chunk that comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx

from deepinfer.bench.serve_workload import Request

LOOP_CHECK_INTERVAL = 0.02  # seconds
CONNECTIONS_PER_POOL = 32  # httpx walks through a whole pool for every request: with 1,000 connections that is slow
_MESSAGE_LENGTH = 300


@dataclass(frozen=True)
class Target:
    """Where requests go; `options` are fields of every body (temperature, ignore_eos, ...)."""

    url: str
    model: str
    chat: bool
    timeout: float  # seconds of a whole request
    options: dict[str, Any] = field(default_factory=dict)

    def body(self, request: Request) -> bytes:
        fields: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            fields["messages"] = [{"role": "user", "content": request.prompt}]
            fields["max_completion_tokens"] = request.output_len
        else:
            fields["prompt"] = request.prompt
            fields["max_tokens"] = request.output_len
        return json.dumps(fields | self.options).encode()


@dataclass
class Sample:
    """What happened to one request; seconds throughout.  Token counts are those of the server's `usage`.

    `lag` is how much later than planned the client was ready to send it, `queued` how long it then waited for
    --max-concurrency.  `chunk_times` and `e2e` count from the moment it was sent.
    """

    started: float = 0.0  # after the start of the run
    lag: float = 0.0
    queued: float = 0.0
    e2e: float = 0.0  # to the last chunk with a choice; for a failed request, to the failure
    chunk_times: list[float] = field(default_factory=list)  # of the chunks that carried output
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None  # its kind, such as "HTTP 429"
    message: str = ""

    @property
    def ttft(self) -> float | None:
        return self.chunk_times[0] if self.chunk_times else None

    @property
    def tpot(self) -> float | None:
        """(E2E - TTFT) / (output tokens - 1); None for an answer of fewer than two tokens."""
        if self.ttft is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Gaps between chunks, whatever number of tokens each carried."""
        return [later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


@dataclass
class Load:
    """Everything a run measured."""

    samples: list[Sample]
    loop_lags: list[float]  # seconds by which a periodic timer of this process fired late


class _Failure(Exception):
    """(kind, message) of a request that the server answered wrongly."""


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """Data of each server-sent event."""
    rest = b""
    async for block in response.aiter_bytes():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()
    if rest.startswith(b"data:"):  # a last event whose line end is missing
        yield rest[5:].strip().decode()


def carries_output(choice: dict[str, Any]) -> bool:
    """Whether a chunk's choice holds something generated; a chat stream opens with a role and no content."""
    delta = choice.get("delta") or {}
    generated = ("content", "reasoning", "reasoning_content", "refusal", "tool_calls")
    return bool(choice.get("text") or choice.get("token_ids") or any(delta.get(key) for key in generated))


async def _stream(http: httpx.AsyncClient, url: str, body: bytes, sample: Sample, begun: float) -> None:
    headers = {"Content-Type": "application/json"}
    done = False
    async with http.stream("POST", url, content=body, headers=headers) as response:
        if response.status_code != 200:
            raise _Failure(f"HTTP {response.status_code}", error_message(await response.aread()))
        async for data in events(response):
            now = perf_counter() - begun
            if data == "[DONE]":
                done = True
                continue
            chunk = json.loads(data)
            if error := chunk.get("error"):
                raise _Failure("error in the stream", error_message(json.dumps({"error": error}).encode()))
            for choice in chunk.get("choices") or ():
                sample.e2e = now
                sample.finish_reason = choice.get("finish_reason") or sample.finish_reason
                if carries_output(choice):
                    sample.chunk_times.append(now)
            if usage := chunk.get("usage"):
                sample.prompt_tokens, sample.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
                sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if sample.e2e == 0:
        raise _Failure("empty answer", "the stream held no choice")
    if sample.finish_reason is None and not done:
        raise _Failure("stream ended early", "neither a finish_reason nor [DONE] came")
    if not sample.chunk_times and sample.output_tokens != 0:  # tokens without text, such as the end token alone
        sample.chunk_times.append(sample.e2e)


def error_message(raw: bytes) -> str:
    """The message of an OpenAI error body, else its text."""
    text = raw.decode(errors="replace")
    try:
        body = json.loads(text)
        error = body.get("error", body)
        text = str(error.get("message") or error.get("detail") or text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return text.strip()[:_MESSAGE_LENGTH]


async def send(http: httpx.AsyncClient, target: Target, body: bytes) -> Sample:
    """One request from sending to the last byte; a failure is noted in the sample, never raised."""
    sample = Sample()
    begun = perf_counter()
    try:
        async with asyncio.timeout(target.timeout):
            await _stream(http, target.url, body, sample, begun)
    except _Failure as failure:
        sample.error, sample.message = failure.args
    except TimeoutError:
        sample.error, sample.message = "timeout", f"no complete answer after {target.timeout:g} s"
    except httpx.ConnectError as error:
        sample.error, sample.message = "connection failed", str(error) or repr(error)
    except httpx.HTTPError as error:
        sample.error, sample.message = "connection lost", str(error) or repr(error)
    except (ValueError, AttributeError, TypeError) as error:
        sample.error, sample.message = "malformed stream", repr(error)[:_MESSAGE_LENGTH]
    if sample.error:
        sample.e2e = perf_counter() - begun
    return sample


async def _watch_event_loop(lags: list[float]) -> None:
    """A timer that should fire every LOOP_CHECK_INTERVAL: what it is late by, chunks are stamped late by."""
    while True:
        due = perf_counter() + LOOP_CHECK_INTERVAL
        await asyncio.sleep(LOOP_CHECK_INTERVAL)
        late = max(0.0, perf_counter() - due)
        lags.append(late)
        while (late := late - LOOP_CHECK_INTERVAL) > 0:  # the times that it should have fired meanwhile
            lags.append(late)


@contextlib.asynccontextmanager
async def connect(concurrency: int, headers: dict[str, str]) -> AsyncIterator[list[httpx.AsyncClient]]:
    """HTTP clients enough for `concurrency` requests at a time."""
    tls = httpx.create_ssl_context()
    # Shorter than the 5 s after which uvicorn closes an idle connection, lest a request meets the closing.
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=3)
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                httpx.AsyncClient(headers=headers, limits=unlimited, timeout=None, verify=tls)  # `send` has the timeout
            )
            for _ in range(math.ceil(concurrency / CONNECTIONS_PER_POOL))
        ]


async def run_load(
    clients: Sequence[httpx.AsyncClient],
    target: Target,
    requests: Sequence[Request],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    on_done: Callable[[Sample], None] = lambda sample: None,
) -> Load:
    """Send request i `arrivals[i]` seconds (ascending) after the start, at most `max_concurrency` at a time."""
    bodies = [target.body(request) for request in requests]
    slots: Any = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    lags: list[float] = []
    watch = asyncio.create_task(_watch_event_loop(lags))
    start = perf_counter()

    in_flight = [0] * len(clients)

    async def one(body: bytes, due: float) -> Sample:
        ready = perf_counter() - start
        async with slots:
            # The first pool with room, so that connections are used again.
            pool = next((number for number, count in enumerate(in_flight) if count < CONNECTIONS_PER_POOL), -1)
            in_flight[pool] += 1
            started = perf_counter() - start
            sample = await send(clients[pool], target, body)
            in_flight[pool] -= 1
        sample.started, sample.lag, sample.queued = started, ready - due, started - ready
        on_done(sample)
        return sample

    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for body, due in zip(bodies, arrivals, strict=True):
                if (wait := start + due - perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(one(body, due)))
    finally:
        watch.cancel()
    return Load([task.result() for task in tasks], lags)
