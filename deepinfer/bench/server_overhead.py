"""`deepinfer bench overhead`: what HTTP, recipe and the way to the engine process add to a step of the engine.

Each round runs the same requests one way after the other: by the bare engine in this process, and as streams of chat
completions through a real `deepinfer serve` with its default settings. A decode step gives every stream one token, so
the gap between two pieces of a stream is a step as a client sees it: its median less that of the engine's own steps is
the overhead. A server leaves itself a core: the overhead is over an engine on as many threads, while the throughput (of
whole runs, prefill included) is compared with an engine on every core. CPU times stand beside them, because on a busy
machine they move less than wall time: that of the server's process, which works while the engine is in its next step,
and what the engine process needs more than the engine alone.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import torch

from deepinfer.bench.results import Record, median_of
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.child import default_threads
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


def measure(
    model: str, num_streams: int, num_tokens: int, rounds: int, command: str, every_core: bool = False
) -> list[Record]:
    """Print every round; medians over the rounds, which the records keep.

    `every_core`: each round runs the requests a third time, on a server whose engine leaves no core to it.
    """
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
    engine = load_engine(model, EngineConfig(max_num_seqs=num_streams))
    # The default server leaves itself a core: its step is compared with the same engine on as many threads, its
    # throughput with the engine on every core.
    every, left = torch.get_num_threads(), default_threads()
    like = "offline" if left == every else f"offline, {left} thread{'s' if left > 1 else ''}"
    threads = {"offline": every, like: left}
    settings = {"server": ()} | ({"server, every core": ("--threads", str(every))} if every_core else {})
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(model, num_streams, *asked)) for name, asked in settings.items()}
        url = f"http://127.0.0.1:{servers['server'].port}/v1/chat/completions/render"
        prompts = [httpx.post(url, json=body, timeout=60).json()["token_ids"] for body in bodies]
        run_offline(engine, prompts, [SamplingParams(max_tokens=4, ignore_eos=True)] * num_streams)
        for server in servers.values():
            all_streams(server.port, [body | {"max_tokens": 4} for body in bodies])
        runs: dict[str, list[Run]] = {name: [] for name in (*threads, *servers)}
        for number in range(rounds):
            # The order changes, so that a machine that gets slower or faster favours none.
            kinds = list(runs)
            shift = number % len(kinds)
            for kind in kinds[shift:] + kinds[:shift]:
                if kind in threads:
                    torch.set_num_threads(threads[kind])
                    runs[kind].append(offline_run(engine, prompts, params))
                else:
                    runs[kind].append(online_run(servers[kind], bodies, num_tokens))
            print("; ".join(f"{kind}: {runs[kind][-1].told(num_streams, num_tokens)}" for kind in runs), flush=True)
    torch.set_num_threads(every)
    records = []
    for name in servers:
        streams = f"{num_streams} streams{name.removeprefix('server')}"
        same = runs[like if name == "server" else "offline"]
        records += compared(runs["offline"], same, runs[name], streams, num_tokens, num_streams, command)
    rate = partial(median_of, part="3", unit="tok/s", command=command)
    for name in threads:
        totals = [num_tokens * num_streams / run.seconds for run in runs[name]]
        records.append(rate(f"output tokens per second, {name} ({num_streams} streams)", totals))
    return records


@dataclass
class Run:
    """All requests once: median step and CPU times of the engine's and the server's process in ms a step."""

    seconds: float
    step_ms: float
    engine_cpu_ms: float
    server_cpu_ms: float = 0.0

    def told(self, num_streams: int, num_tokens: int) -> str:
        cpu = f"CPU of the engine {self.engine_cpu_ms:.1f} ms"
        if self.server_cpu_ms:
            cpu += f", of the server {self.server_cpu_ms:.2f} ms"
        return f"step {self.step_ms:.2f} ms, {num_tokens * num_streams / self.seconds:.0f} tok/s, {cpu}"


def offline_run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> Run:
    start, cpu = time.monotonic(), time.process_time()
    steps = run_offline(engine, prompts, params)
    seconds, cpu = time.monotonic() - start, time.process_time() - cpu
    return Run(seconds, 1e3 * statistics.median(steps), 1e3 * cpu / (params[0].max_tokens or 1))


def online_run(server: ServerProcess, bodies: list[dict], num_tokens: int) -> Run:
    """Raises RuntimeError if a token is lost."""
    start, (server_cpu, engine_cpu) = time.monotonic(), server.cpu_seconds()
    answers = all_streams(server.port, bodies)
    seconds, (server_after, engine_after) = time.monotonic() - start, server.cpu_seconds()
    if [count for count, _ in answers] != [num_tokens] * len(bodies):
        raise RuntimeError("tokens were lost")
    step = statistics.median(gap for _, times in answers for gap in gaps(times))
    each = 1e3 / num_tokens
    return Run(seconds, 1e3 * step, each * (engine_after - engine_cpu), each * (server_after - server_cpu))


def compared(
    offline: list[Run],
    same_threads: list[Run],
    online: list[Run],
    streams: str,
    num_tokens: int,
    num_streams: int,
    command: str,
) -> list[Record]:
    """Records of a server beside the engine alone, round by round: on every core, and on as many threads."""
    pairs = list(zip(same_threads, online, strict=True))
    per_step = partial(median_of, part="3", unit="ms", higher_is_better=False, command=command)
    share = partial(median_of, part="3", unit="share", command=command)
    rate = partial(median_of, part="3", unit="tok/s", command=command)
    return [
        per_step(
            f"server overhead a token-step ({streams})",
            [two.step_ms - one.step_ms for one, two in pairs],
            target=TARGET_MS,
        ),
        share(
            f"server throughput over offline ({streams})",
            [one.seconds / two.seconds for one, two in zip(offline, online, strict=True)],
            target=TARGET_SHARE,
        ),
        per_step(f"CPU time of the server's process a token-step ({streams})", [run.server_cpu_ms for run in online]),
        per_step(
            f"CPU time of the engine process over the bare engine's a token-step ({streams})",
            [two.engine_cpu_ms - one.engine_cpu_ms for one, two in pairs],
        ),
        rate(
            f"output tokens per second, served ({streams})",
            [num_tokens * num_streams / run.seconds for run in online],
        ),
    ]
