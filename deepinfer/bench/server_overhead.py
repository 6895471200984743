"""`deepinfer bench overhead`: what HTTP, recipe and the way to the engine process add to a step of the engine.

Each round runs the same requests twice, one after the other: by the bare engine in this process, and as streams of
chat completions through a real `deepinfer serve`. A decode step gives every stream one token, so the gap between two
pieces of a stream is a step as a client sees it: its median less that of the engine's own steps is the overhead. The
throughput is of whole runs, prefill included. CPU times are measured beside them, because on a busy machine they move
less than wall time: that of the server's process, which works while the engine is in its next step, and what the engine
process needs more than the engine alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from deepinfer.bench.results import Record, median_of
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import load_engine
from deepinfer.params import SamplingParams

TARGET_MS, TARGET_SHARE = 1.0, 0.9
PROMPT = "Tell me a short story about lighthouse number {}."


@dataclass
class ServerProcess:
    """A `deepinfer serve` of this benchmark."""

    pid: int
    port: int

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time so far of the server's process and of its engine's."""
        engine = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0]
        return cpu_seconds(self.pid), cpu_seconds(int(engine))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(model: str, num_streams: int, *options: str) -> Iterator[ServerProcess]:
    """A server with room for all streams at once, on a free port. Raises RuntimeError if it does not start."""
    command = [sys.executable, "-m", "deepinfer.cli", "serve", "--model", model, "--port", "0", "--no-web"]
    command += ["--log-level", "warning", "--max-num-seqs", str(num_streams), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        match = re.search(r"http://[^:]+:(\d+)/v1", process.stdout.readline())
        if match is None:
            raise RuntimeError("the server did not start")
        # It says where it will listen a moment before it does.
        with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:
            while client.get(f"http://127.0.0.1:{match[1]}/ready", timeout=60).status_code != 200:
                if process.poll() is not None:
                    raise RuntimeError("the server did not start")
                time.sleep(0.1)
        yield ServerProcess(process.pid, int(match[1]))
    finally:
        process.terminate()
        process.wait()


class Reading(asyncio.Protocol):
    """One answer: when its pieces arrived, and its end."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.arrivals: list[float] = []
        self.tail = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.arrivals.append(time.monotonic())
        self.tail = (self.tail + data)[-4096:]

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


async def stream(port: int, body: dict) -> tuple[int, list[float]]:
    """(completion tokens as the usage chunk counts them, arrival time of each piece of the answer) of one stream.

    Reads the socket itself: an HTTP client would cost more than the server that is measured.
    """
    payload = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload
    _, reading = await asyncio.get_running_loop().create_connection(lambda: Reading(request), "127.0.0.1", port)
    await reading.ended
    usage = re.findall(rb'"completion_tokens":(\d+)', reading.tail)
    if not usage or b"[DONE]" not in reading.tail:
        raise RuntimeError(f"a stream ended early: {reading.tail[-300:]!r}")
    return int(usage[-1]), reading.arrivals


def all_streams(port: int, bodies: list[dict]) -> list[tuple[int, list[float]]]:
    async def run() -> list[tuple[int, list[float]]]:
        return list(await asyncio.gather(*(stream(port, body) for body in bodies)))

    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.run(run())
    return uvloop.run(run())


def run_offline(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[float]:
    """Seconds of every step in which all prompts got a token."""
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params[number])
    steps = []
    while engine.has_unfinished_requests():
        start = time.monotonic()
        if len(engine.step()) == len(prompts):
            steps.append(time.monotonic() - start)
    return steps


def gaps(arrivals: list[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(arrivals, arrivals[1:], strict=False)]


def measure(model: str, num_streams: int, num_tokens: int, rounds: int, command: str) -> list[Record]:
    """Print every round; medians over the rounds."""
    bodies = [
        {
            "model": Path(model).name,
            "messages": [{"role": "user", "content": PROMPT.format(number)}],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "seed": number,
        }
        for number in range(num_streams)
    ]
    params = [SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=number) for number in range(num_streams)]
    offline_ms, server_ms, cpu_ms, more_cpu_ms, shares = [], [], [], [], []
    engine = load_engine(model, EngineConfig(max_num_seqs=num_streams))
    with serving(model, num_streams) as server:
        url = f"http://127.0.0.1:{server.port}/v1/chat/completions/render"
        prompts = [httpx.post(url, json=body, timeout=60).json()["token_ids"] for body in bodies]
        run_offline(engine, prompts, [SamplingParams(max_tokens=4, ignore_eos=True)] * num_streams)
        all_streams(server.port, [body | {"max_tokens": 4} for body in bodies])
        for number in range(rounds):
            # The order alternates, so that a machine that gets slower or faster favours neither.
            for kind in ("offline", "server") if number % 2 == 0 else ("server", "offline"):
                start, own_cpu, (server_cpu, engine_cpu) = time.monotonic(), time.process_time(), server.cpu_seconds()
                if kind == "offline":
                    offline_ms.append(1e3 * statistics.median(run_offline(engine, prompts, params)))
                    offline_total, offline_cpu = time.monotonic() - start, time.process_time() - own_cpu
                else:
                    answers = all_streams(server.port, bodies)
                    server_total = time.monotonic() - start
                    server_ms.append(1e3 * statistics.median(gap for _, times in answers for gap in gaps(times)))
                    server_after, engine_after = server.cpu_seconds()
                    cpu_ms.append((server_after - server_cpu) * 1e3 / num_tokens)
                    online_cpu = engine_after - engine_cpu
                    if [count for count, _ in answers] != [num_tokens] * num_streams:
                        raise RuntimeError("tokens were lost")
            shares.append(offline_total / server_total)
            more_cpu_ms.append((online_cpu - offline_cpu) * 1e3 / num_tokens)
            print(
                f"a step of {num_streams} streams: offline {offline_ms[-1]:.2f} ms, server {server_ms[-1]:.2f} ms, "
                f"CPU: server process {cpu_ms[-1]:.2f} ms, engine process {more_cpu_ms[-1]:+.2f} ms; "
                f"throughput {shares[-1]:.1%} of offline",
                flush=True,
            )
    overheads = [online - offline for online, offline in zip(server_ms, offline_ms, strict=True)]
    per_step = partial(median_of, part="3", unit="ms", higher_is_better=False, command=command)
    streams = f"{num_streams} streams"
    return [
        per_step(f"server overhead a token-step ({streams})", overheads, target=TARGET_MS),
        median_of(
            f"server throughput over offline ({streams})",
            shares,
            part="3",
            unit="share",
            target=TARGET_SHARE,
            command=command,
        ),
        per_step(f"CPU time of the server's process a token-step ({streams})", cpu_ms),
        per_step(f"CPU time of the engine process over the bare engine's a token-step ({streams})", more_cpu_ms),
    ]
