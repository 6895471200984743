"""A real `deepinfer serve` process, and clients for it."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anthropic
import httpx
import openai

MODEL = "tiny"
KEY = "secret-key"


def lines_of(answer: httpx.Response) -> Iterator[str]:
    """Lines of an event stream. httpx's own iter_lines also splits at U+2028 and the like, which JSON may hold."""
    rest = b""
    for part in answer.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.decode() for line in lines)


@dataclass
class Server:
    """A running `deepinfer serve`; `log` collects what it prints."""

    process: subprocess.Popen
    url: str
    log: list[str] = field(default_factory=list)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    @property
    def messages_client(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=KEY, max_retries=0, timeout=60)

    @property
    def async_messages_client(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=KEY, max_retries=0, timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        """Value of one sample of /metrics; 0 if it has not been seen yet."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            match = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
            if match and wanted <= set((match[1] or "").split(",")):
                return float(match[2])
        return 0.0

    def wait_for(self, name: str, value: float, seconds: float = 20, **labels: str) -> None:
        deadline = time.monotonic() + seconds
        while self.metric(name, **labels) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name, **labels)}, not {value}"
            time.sleep(0.02)


def start_server(checkpoint: Path, *options: str, prefix: Sequence[str] = ()) -> Server:
    """`prefix`: a command that runs the server's command."""
    command = [*prefix, sys.executable, "-m", "deepinfer.cli", "serve", "--model", str(checkpoint), "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, bufsize=1
    )
    assert process.stdout is not None
    log: list[str] = []
    for line in process.stdout:
        log.append(line)
        match = re.search(r"at (http://\S+)/v1", line)
        if match:
            break
    else:
        raise AssertionError("the server did not start:\n" + "".join(log))
    server = Server(process, match[1], log)
    threading.Thread(target=lambda: log.extend(process.stdout or ()), daemon=True).start()
    deadline = time.monotonic() + 60
    while True:
        try:
            if httpx.get(f"{server.url}/ready").status_code == 200:
                return server
        except httpx.TransportError:
            assert time.monotonic() < deadline and process.poll() is None, "".join(log)
            time.sleep(0.05)
