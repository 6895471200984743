"""The engine process as its parent sees it: how it is started and spoken to, how many threads it gets, how it ended."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable

from deepinfer.engine.messages import Connection, EngineMessage, Failed, ServerMessage
from deepinfer.errors import EngineStoppedError


def default_threads() -> int:
    """Processor threads for the engine's arithmetic: of more than two cores one is left to the server beside it.

    An engine that shares a core with the server waits with all its threads for the one that was interrupted; of two
    cores one less costs it more than that. OMP_NUM_THREADS decides, if it is set.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores - 1 if cores > 2 else cores


class Child:
    """A process that waits for a Start message to load a model and run an engine."""

    def __init__(self, threads: int) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "deepinfer.engine.process", str(theirs.fileno())]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.sock = ours
        self._connection: Connection[EngineMessage] = Connection(ours, EngineMessage)
        self._loop: asyncio.AbstractEventLoop | None = None

    def send(self, message: ServerMessage) -> None:
        """Never blocks. A process that is gone hears nothing: `receive` says so."""
        try:
            self._connection.send(message)
        except OSError:
            return
        self._send_rest()

    def receive(self) -> list[EngineMessage]:
        """What has come; never blocks. Raises EOFError if nothing has, and nothing will."""
        return self._connection.receive()

    def listen(self, loop: asyncio.AbstractEventLoop, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` in this event loop when there is something to `receive`, and send there what waits."""
        self._loop = loop
        loop.add_reader(self.sock, on_readable)
        self._send_rest()

    def hang_up(self) -> bool:
        """Close the socket, and so end the process. False if that has been done."""
        if self.sock.fileno() < 0:
            return False
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.sock)
            self._loop.remove_writer(self.sock)
        self.sock.close()
        return True

    def kill(self) -> int:
        """Returns the exit code."""
        self.process.kill()
        return self.process.wait()

    def _send_rest(self) -> None:
        if self._connection.has_unsent and self._loop is not None:
            self._loop.add_writer(self.sock, self._flush)

    def _flush(self) -> None:
        assert self._loop is not None
        try:
            self._connection.flush()
        except OSError:
            self._loop.remove_writer(self.sock)
        if not self._connection.has_unsent:
            self._loop.remove_writer(self.sock)


def ending(code: int) -> str:
    """How a process ended, from its exit code, for an error."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def died_loading(code: int) -> EngineStoppedError:
    """What requests are told when the process ended before it was ready."""
    return EngineStoppedError(f"the engine process {ending(code)} while it loaded the model")


def start_error(failed: Failed) -> Exception:
    """What the process could not load, as the error that loading it here would have raised."""
    if failed.kind == "value":
        return ValueError(failed.message)
    if failed.kind == "os":
        return OSError(0, failed.message, failed.filename)
    return EngineStoppedError(f"the engine could not be loaded: {failed.kind}: {failed.message}")
