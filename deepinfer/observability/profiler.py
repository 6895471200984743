"""Profiler traces on demand: an optional HTTP endpoint of an engine process, for the operator.

    curl -X POST 'http://127.0.0.1:9000/start_profile?steps=20'
    curl -X POST http://127.0.0.1:9000/stop_profile

The profiler records the thread that starts it, so it is started and stopped by the engine's own thread, between steps.
A trace is a Chrome trace file (chrome://tracing, Perfetto) in a folder that only the operator chooses.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from deepinfer.observability.timers import CPUTimer

logger = logging.getLogger(__name__)

MAX_STEPS = 10_000


class TraceCapture:
    """At most one trace at a time. Requests come from any thread; `between_steps` carries them out.

    While it records, the scopes of `timer` are ranges in the trace.
    """

    def __init__(self, directory: Path, timer: CPUTimer | None = None) -> None:
        self.directory = directory
        self.timer = timer or CPUTimer(False)
        self.wake: Callable[[], None] = lambda: None  # makes an idle engine call between_steps soon
        self.state = "idle"  # idle, starting, recording or stopping
        self.latest: Path | None = None
        self.error: str | None = None  # why the latest trace was not written
        self._steps_left: int | None = None
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._profiler: Any = None

    def start(self, steps: int | None) -> None:
        """Record from the next step on, for `steps` steps or until `stop`. Raises ValueError if one is under way."""
        if steps is not None and not 1 <= steps <= MAX_STEPS:
            raise ValueError(f"steps must be an integer in [1, {MAX_STEPS}], got {steps}")
        with self._lock:
            if self.state != "idle":
                raise ValueError(f"a trace is under way ({self.state})")
            self.state, self._steps_left = "starting", steps
            self._finished.clear()
        self.wake()

    def stop(self, timeout: float = 60.0) -> Path:
        """End the trace and wait for its file.

        Raises ValueError if none is under way, TimeoutError if no step comes, OSError if it could not be written.
        """
        with self._lock:
            if self.state == "idle":
                raise ValueError("no trace is under way")
            self.state = "stopping"
        self.wake()
        if not self._finished.wait(timeout):
            raise TimeoutError("the engine has not finished its step")
        if self.latest is None:
            raise OSError(self.error)
        return self.latest

    def between_steps(self) -> None:
        """Called by the engine's thread before a step, and when `wake` asks for it."""
        if self.state in ("idle", "recording"):
            return
        with self._lock:
            if self._profiler is None:
                activities = [torch.profiler.ProfilerActivity.CPU]
                if torch.cuda.is_available():
                    activities.append(torch.profiler.ProfilerActivity.CUDA)
                self._profiler = torch.profiler.profile(activities=activities)
                self._profiler.start()
                self.timer.annotated = True
            if self.state == "starting":
                self.state = "recording"
            else:
                self._finish()

    def after_step(self) -> None:
        """Called by the engine's thread after a step."""
        if self._profiler is None or self._steps_left is None:
            return
        with self._lock:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._finish()

    def _finish(self) -> None:
        """A trace that cannot be written, to a full disk say, costs nothing but itself."""
        self.timer.annotated = False
        profiler, self._profiler = self._profiler, None
        self.latest, self.error = None, None
        name = f"deepinfer-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06}.json"
        try:
            profiler.stop()
            self.directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.directory / name))
            (self.directory / name).stat()  # it may have been logged only that there is no file
            self.latest = self.directory / name
            logger.info("wrote the trace %s", self.latest)
        except (OSError, RuntimeError) as error:
            self.error = f"the trace could not be written to {self.directory}: {error}"
            logger.error("%s", self.error)
        finally:
            self.state = "idle"
            self._finished.set()


class ProfilerServer:
    """POST /start_profile?steps=N, POST /stop_profile, GET /status; JSON answers. Runs in a thread until `close`.

    There is no password: it binds to the loopback address unless told otherwise.
    Raises ValueError if the address is taken or not valid.
    """

    def __init__(self, capture: TraceCapture, host: str, port: int) -> None:
        handler = type("Handler", (_Handler,), {"capture": capture})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise ValueError(f"cannot listen for the profiler on {host}:{port}: {error.strerror}") from None
        self._server.daemon_threads = True
        self.address: tuple[str, int] = self._server.server_address[:2]  # type: ignore[assignment]
        self._thread = threading.Thread(target=self._server.serve_forever, name="deepinfer-profiler", daemon=True)
        self._thread.start()
        logger.info("profiler at http://%s:%d", *self.address)

    def close(self) -> None:
        """Stop serving; a trace that runs is not waited for."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    capture: TraceCapture

    def do_GET(self) -> None:
        if urlsplit(self.path).path != "/status":
            return self._answer(404, error="known are GET /status, POST /start_profile, POST /stop_profile")
        latest = self.capture.latest
        failed = {} if self.capture.error is None else {"error": self.capture.error}
        self._answer(200, state=self.capture.state, latest=None if latest is None else str(latest), **failed)

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        if self.headers.get("Origin"):
            return self._answer(403, error="not for web pages")
        try:
            if url.path == "/start_profile":
                given = parse_qs(url.query).get("steps", [])
                self.capture.start(_steps(given[-1]) if given else None)
                self._answer(200, state=self.capture.state)
            elif url.path == "/stop_profile":
                self._answer(200, trace=str(self.capture.stop()))
            else:
                self._answer(404, error="known are GET /status, POST /start_profile, POST /stop_profile")
        except ValueError as error:
            self._answer(400, error=str(error))
        except TimeoutError as error:
            self._answer(503, error=str(error))
        except OSError as error:
            self._answer(500, error=str(error))

    def _answer(self, status: int, **body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class's name)
        logger.debug(format, *args)


def _steps(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ValueError(f"steps must be an integer in [1, {MAX_STEPS}], got {text[:40]!r}")
    return int(text)
