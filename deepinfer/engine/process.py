"""The engine process: `python -m deepinfer.engine.process FD`, started by EngineClient with a socket as FD.

Steps run in the main thread; the socket is looked at between them, without waiting while there is work. What a step
made leaves in one message. The process ends when the server closes the socket, or dies and so the kernel closes it.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from deepinfer import envs
from deepinfer.engine.compiling import Compiling
from deepinfer.engine.messages import (
    Abort,
    AddRequest,
    CancelCompile,
    Compile,
    Compiled,
    Connection,
    Failed,
    Heartbeat,
    Pause,
    Paused,
    PromptPart,
    Ready,
    RecordExperts,
    RefusalKind,
    Refused,
    ServerMessage,
    Start,
    StepOutputs,
    output_to_wire,
    prompt_to_wire,
    record_experts,
)
from deepinfer.engine.output_pool import RequestOutputPool
from deepinfer.errors import BusyError
from deepinfer.observability.log_format import apply_log_config, log_handler
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine

logger = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 1.0
ORPHAN_SECONDS = 2.0  # how long a step may go on after the server is gone


def main(fd: int) -> None:
    # A terminal and a service manager signal the whole group: it is the server's part to drain and to say when to stop.
    """Load the engine that the first message names, then serve the socket `fd` until its other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    threading.Thread(target=_die_with_server, args=(sock.fileno(),), name="orphan-watch", daemon=True).start()
    connection: Connection[ServerMessage] = Connection(sock, ServerMessage)
    try:
        engine = _load(connection)
        if engine is not None:
            EngineLoop(engine, connection).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the server is gone


def _die_with_server(fd: int) -> None:
    """Also a step that never returns ends with the server."""
    hang_up = select.poll()
    hang_up.register(fd, 0)  # POLLHUP is always reported
    hang_up.poll()
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def _load(connection: Connection[ServerMessage]) -> Engine | None:
    """The engine that the first message asks for; None if it cannot be loaded, and the server has been told why."""
    messages: list[ServerMessage] = []
    while not messages:
        select.select([connection.sock], [], [])
        messages = connection.receive()
    start = messages[0]
    assert isinstance(start, Start)
    show_log(start.log_level, start.log_format)
    try:
        from deepinfer.config.engine import EngineConfig
        from deepinfer.engine.loading import load_engine

        engine = load_engine(start.model, EngineConfig(**start.config))
    except ValueError as error:
        connection.send(Failed("value", str(error)))
    except OSError as error:
        connection.send(Failed("os", error.strerror or str(error), error.filename and str(error.filename)))
    except Exception as error:
        logger.exception("the engine could not be loaded")
        connection.send(Failed(type(error).__name__, str(error)))
    else:
        connection.send(Ready(engine.runner.vocab_size, engine.max_model_len, engine.stats(), engine.config.device))
        return engine
    return None


def show_log(level: str, log_format: str = "text") -> None:
    """Print the engine's log to standard error."""
    log = logging.getLogger("deepinfer")
    log.setLevel(level.upper())
    if not log.handlers:
        log.addHandler(log_handler(log_format))
        log.propagate = False
        apply_log_config()


class EngineLoop:
    """Obeys messages between steps and sends what the steps made."""

    def __init__(self, engine: Engine, connection: Connection[ServerMessage]):
        self.engine, self.connection = engine, connection
        engine.outputs = RequestOutputPool(debug=envs.get("DEEPINFER_CHECK_INTEGRITY"))  # encoded before the next step
        self.heartbeat_due = 0.0
        self.is_paused = False
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)
        engine.observer.set_wake(self._wake)
        self.compiling = Compiling(self._wake)
        if engine.grammars is not None:
            engine.grammars.protect()
        self.grammars: dict[int, Future[Any]] = {}  # that the server waits for
        self.compiled: deque[Compiled] = deque()  # answers that are to be sent

    def run(self) -> None:
        """Until the server closes its side (EOFError)."""
        try:
            while True:
                if self.is_paused or not self.engine.has_unfinished_requests():
                    self._wait()
                self._obey()
                if not self.is_paused and self.engine.has_unfinished_requests():
                    self._send(self.engine.step())
                    for request_id, entries in self.engine.take_prompt_logprobs():
                        self.connection.send(PromptPart(int(request_id), prompt_to_wire(entries)))
                elif time.monotonic() >= self.heartbeat_due:
                    self.connection.send(self._heartbeat())
        finally:
            self.engine.observer.close()

    def _wake(self) -> None:
        """From any thread: an observer wants to act while the engine is idle."""
        try:
            os.write(self.wake_write, b"w")
        except BlockingIOError:
            pass  # it is awake

    def _wait(self) -> None:
        """Until there is a message, room for what is unsent, a wake-up or time for a heartbeat."""
        sock, unsent = self.connection.sock, self.connection.has_unsent
        timeout = max(0.0, self.heartbeat_due - time.monotonic())
        watched: list[socket.socket | int] = [sock, self.wake_read]
        readable, writable, _ = select.select(watched, [sock] if unsent else [], [], timeout)
        if writable:
            self.connection.flush()
        if self.wake_read in readable:
            os.read(self.wake_read, 4096)
            self.engine.before_step()

    def _obey(self) -> None:
        for message in self.connection.receive():
            if isinstance(message, AddRequest):
                self._add(message)
            elif isinstance(message, Compile):
                self._compile(message)
            elif isinstance(message, CancelCompile):
                if (grammar := self.grammars.get(message.number)) is not None:
                    grammar.cancel()
            elif isinstance(message, RecordExperts):
                self.connection.send(
                    record_experts(self.engine.observer.stats.experts, message.command, message.number)
                )
            elif isinstance(message, Pause):
                self.is_paused = message.pause
                self.connection.send(Paused(message.number))
            elif isinstance(message, Abort):
                request_id = str(message.number)
                output = self.compiling.abort(request_id) or self.engine.abort_request(request_id)
                if output is not None:
                    self._send([output])
        self.compiling.enter_done()
        while self.compiled:
            self.connection.send(self.compiled.popleft())

    def _add(self, message: AddRequest, grammar: Future[Any] | None = None) -> None:
        request_id = str(message.number)
        try:
            params = SamplingParams(**message.params)
            if params.so_args is not None and grammar is None:
                self.engine.validate(message.prompt_token_ids, params)
                grammar = self.engine.compile(params.so_args)
                if not grammar.done():
                    enter = partial(self._add, message, grammar)
                    self.compiling.add(request_id, message.prompt_token_ids, params, grammar, enter)
                    return
            self.engine.add_request(request_id, message.prompt_token_ids, params, grammar)
        except Exception as error:
            self.connection.send(Refused(message.number, *_refusal(error)))

    def _compile(self, message: Compile) -> None:
        def done(grammar: Future[Any]) -> None:
            """In the thread that compiles: the answer leaves from the engine's."""
            del self.grammars[message.number]
            if grammar.cancelled():
                return
            error = grammar.exception()
            self.compiled.append(Compiled(message.number, *(() if error is None else _refusal(error))))
            self._wake()

        try:
            grammar = self.grammars[message.number] = self.engine.compile(message.so_args)
            grammar.add_done_callback(done)
        except Exception as error:
            self.connection.send(Compiled(message.number, *_refusal(error)))

    def _send(self, outputs: list[RequestOutput]) -> None:
        """The news, and a heartbeat when one is due or the last request is done: figures at rest are exact."""
        news = StepOutputs([output_to_wire(output) for output in outputs], self.engine.stats())
        if time.monotonic() >= self.heartbeat_due or not self.engine.has_unfinished_requests():
            self.connection.send(news, self._heartbeat())
        else:
            self.connection.send(news)

    def _heartbeat(self) -> Heartbeat:
        self.heartbeat_due = time.monotonic() + HEARTBEAT_SECONDS
        observed = self.engine.observer.stats
        return Heartbeat(self.engine.stats(), observed.window(), observed.totals)


def _refusal(error: BaseException) -> tuple[str, RefusalKind]:
    """What the server is told of an error that ends one request. Any but a ValueError is a fault of ours: logged."""
    if not isinstance(error, ValueError):
        logger.error("a request could not be taken", exc_info=error)
    return str(error) or type(error).__name__, "busy" if isinstance(error, BusyError) else "value"


if __name__ == "__main__":
    main(int(sys.argv[1]))
