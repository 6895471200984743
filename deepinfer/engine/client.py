"""EngineClient: an engine in a process of its own, with the interface of AsyncEngine.

It lives in one event loop: one wake-up a step hands the news to all consumers. A process that dies, or says nothing
for too long, fails the requests in progress and is started again, after a pause that doubles from death to death.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

from deepinfer import envs
from deepinfer.config.engine import EngineConfig
from deepinfer.engine import messages
from deepinfer.engine.checks import check_request
from deepinfer.engine.child import Child, default_threads, died_loading, ending, start_error
from deepinfer.engine.mailbox import Deliver, Leave, outputs_of
from deepinfer.engine.messages import (
    EngineMessage,
    ExpertCommand,
    ExpertReport,
    RefusalKind,
    ServerMessage,
    params_to_wire,
)
from deepinfer.engine.questions import Questions
from deepinfer.engine.remote_statistics import RemoteStatistics
from deepinfer.engine.sent_requests import SentRequests
from deepinfer.errors import BusyError, EngineStoppedError
from deepinfer.outputs import EngineStats, RequestOutput
from deepinfer.params import SamplingParams

logger = logging.getLogger(__name__)

EngineState = Literal["starting", "ready", "dead"]
MAX_RESTARTS = 5  # deaths in a row; one that comes after STABLE_SECONDS of service starts a new row
STABLE_SECONDS = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
CLOSE_SECONDS = 10.0  # how long the process may take to end when it is told to


class EngineClient:
    """Starts the engine process and waits until it has loaded the model, or with `wait` False does not wait.

    Then the limits are 0 until the state is "ready"; if it becomes "dead" instead, `start_error` says why. Use `close`
    when done.

    All methods but `close` belong to one event loop: that of the first call of `attach` or `generate`.

    Args:
        model: "nano" or a checkpoint folder.
        config: of the engine.
        log_level, log_format ("text" or "json"): of the process, which logs to standard error.
        threads: processor threads of the process; see `default_threads`.

    Raises (with `wait`):
        ValueError, OSError: the model or the configuration is bad; the same error as load_engine's.
        EngineStoppedError: the process died while it loaded.
    """

    state: EngineState
    _child: Child

    def __init__(
        self,
        model: str,
        config: EngineConfig | None = None,
        log_level: str = "warning",
        wait: bool = True,
        log_format: str = "text",
        threads: int | None = None,
    ):
        self._start = messages.Start(str(model), asdict(config or EngineConfig()), log_level, log_format)
        self._threads = threads or default_threads()
        self._silence = envs.get("DEEPINFER_ENGINE_TIMEOUT")
        self._requests = SentRequests()
        self._questions = Questions()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._restart: asyncio.Task[None] | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._deaths = 0
        self.num_restarts = 0
        self.statistics = RemoteStatistics()
        self.vocab_size = self.max_model_len = 0
        self.device = ""
        self._stats = EngineStats(0, 0, 1, 1, 0, 0, 0)
        self.start_error: Exception | None = None
        self._was_ready = False
        self._spawn()
        if wait:
            self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        try:
            while self.state == "starting":
                select.select([self._child.sock], [], [])
                for message in self._child.receive():
                    self._handle(message)
        except EOFError:
            self.state = "dead"
            self.start_error = died_loading(self._child.process.wait())
        except BaseException:
            self._child.kill()
            raise
        if self.start_error is not None:
            self._child.kill()
            raise self.start_error from None

    @property
    def is_running(self) -> bool:
        """Whether the process is ready for requests."""
        return self.state == "ready"

    @property
    def reason(self) -> str:
        """Why requests are not taken, while the state is not "ready"."""
        return self._reason

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._child.process.pid

    def attach(self) -> None:
        """Listen to the process in the running event loop. `generate` does it too."""
        loop = asyncio.get_running_loop()
        if loop is self._loop or self._closed:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("this EngineClient belongs to another event loop")
        self._loop = loop
        self._listen()

    def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Deltas of one request until `finished`. It is queued on the first `anext`, aborted if closed or cancelled.

        A step that fails ends the request with an output whose `error` says why.

        Raises:
            ValueError: at once for an invalid prompt or parameters; from the generator if request_id is in use.
            EngineStoppedError: the engine is starting, closed or dead; from the generator if it dies.
        """
        params = sampling_params or SamplingParams()
        self.check(prompt_token_ids, params)
        return outputs_of(partial(self.submit, request_id, prompt_token_ids, params))

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """ValueError for an invalid prompt or parameters, EngineStoppedError unless requests are taken."""
        self._check_running()  # before it has started, the limits are unknown
        check_request(prompt_token_ids, params, self.max_model_len, self.vocab_size)

    def submit(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, deliver: Deliver
    ) -> Leave:
        """Queue a request that `check` has passed; call what is returned to end it and hear no more of it.

        `deliver` is called in the event loop, with every output or with the exception that ends the request.

        Raises:
            ValueError: request_id is in use.
            EngineStoppedError: the engine is starting, closed or dead.
        """
        self.attach()
        self._check_running()
        prompt = list(prompt_token_ids)
        number = self._requests.add(request_id, prompt, deliver)
        self._child.send(messages.AddRequest(number, prompt, params_to_wire(params)))
        return partial(self._leave, number)

    def _leave(self, number: int) -> None:
        if self._requests.forget(number):
            self._child.send(messages.Abort(number))

    def abort(self, request_id: str) -> None:
        """End a request from outside; its consumer gets a last output with finish reason "abort"."""
        number = self._requests.number_of(request_id)
        if number is not None:
            self._child.send(messages.Abort(number))

    async def compile(self, so_args: Mapping[str, Any]) -> None:
        """Have the grammar of structured output ready. Raises ValueError naming the field, BusyError,
        EngineStoppedError."""
        await self._ask(lambda number: messages.Compile(number, dict(so_args)), messages.CancelCompile)

    async def record_experts(self, command: ExpertCommand) -> ExpertReport:
        """Start, stop or show the record of how many tokens each expert got.  Raises EngineStoppedError."""
        return await self._ask(lambda number: messages.RecordExperts(number, command))

    async def pause(self, pause: bool) -> None:
        """Make no step and keep what runs, or go on. Returns when no step is in progress. Raises EngineStoppedError."""
        await self._ask(lambda number: messages.Pause(number, pause))

    async def _ask(
        self, message: Callable[[int], ServerMessage], cancel: Callable[[int], ServerMessage] | None = None
    ) -> Any:
        """The answer of the process to a message that carries a number; `cancel` says that nobody waits for it."""
        self.attach()
        self._check_running()

        def leave(number: int) -> None:
            if cancel is not None:
                self._child.send(cancel(number))

        return await self._questions.ask(lambda number: self._child.send(message(number)), leave)

    def stats(self) -> EngineStats:
        """As of the latest step."""
        return self._stats

    def close(self) -> None:
        """Stop after the step in progress; requests still running raise EngineStoppedError in their consumers.

        Blocks until the process has ended; any thread may call it.
        """
        with self._closing:
            if self._closed:
                return
            was_ready = self.state == "ready"
            self._closed = True
            self.state = "dead"
            self._reason = "the engine is closed"
            try:
                self._child.sock.shutdown(socket.SHUT_WR)
                self._child.process.wait(CLOSE_SECONDS if was_ready else 0)  # one that loads a model does not listen
            except (OSError, subprocess.TimeoutExpired):
                self._child.kill()
            if self._loop is None or self._loop.is_closed():
                self._child.hang_up()
            elif self._loop is _running_loop():
                self._hang_up()
            else:
                try:
                    self._loop.call_soon_threadsafe(self._hang_up)
                except RuntimeError:  # closed a moment ago
                    self._child.hang_up()

    def _check_running(self) -> None:
        if self.state != "ready":
            raise EngineStoppedError(self._reason)

    # The process and its socket.

    def _spawn(self) -> None:
        self.state = "starting"
        if not self._was_ready:
            self._reason = "the engine is starting: it loads the model"
        self._child = Child(self._threads)
        self._heard = time.monotonic()
        self._child.send(self._start)

    def _listen(self) -> None:
        assert self._loop is not None
        self._child.listen(self._loop, self._on_readable)
        self._heard = time.monotonic()
        self._watch_silence()

    def _on_readable(self) -> None:
        self._heard = time.monotonic()
        try:
            for message in self._child.receive():
                self._handle(message)
        except EOFError:
            self._hang_up()
        except Exception:
            logger.exception("a message of the engine process could not be handled")
            self._child.process.kill()

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, messages.StepOutputs):
            self._stats = message.stats
            for output in message.outputs:
                self._requests.deliver(output)
        elif isinstance(message, messages.PromptPart):
            self._requests.add_prompt_part(message)
        elif isinstance(message, messages.Heartbeat):
            self._stats = message.stats
            self.statistics.update(message.window, message.totals)
        elif isinstance(message, messages.ExpertReport):
            self._questions.answer(message.number, message)
        elif isinstance(message, messages.Paused):
            self._questions.answer(message.number, None)
        elif isinstance(message, messages.Compiled):
            self._questions.answer(
                message.number, None if message.error is None else _refusal(message.error, message.kind)
            )
        elif isinstance(message, messages.Refused):
            self._requests.refuse(message.number, _refusal(message.message, message.kind))
        elif isinstance(message, messages.Ready):
            self.vocab_size, self.max_model_len = message.vocab_size, message.max_model_len
            self._stats, self.device = message.stats, message.device
            self.state, self._ready_since, self._was_ready = "ready", time.monotonic(), True
        elif not self._was_ready:  # starting it again would end in the same way
            self.state, self.start_error = "dead", start_error(message)
            self._reason = str(self.start_error)
        else:
            logger.error("the engine could not be restarted: %s", message.message)

    # Death and restart.

    def _watch_silence(self) -> None:
        """Kill a process that hangs; the end of its socket does the rest. Loading may take as long as it likes."""
        assert self._loop is not None
        if self._silence == 0:
            return
        if self.state == "ready" and time.monotonic() - self._heard > self._silence:
            logger.error("the engine process has been silent for %g s: it is killed", self._silence)
            self._child.process.kill()
            return
        self._watchdog = self._loop.call_later(min(1.0, self._silence / 4), self._watch_silence)

    def _hang_up(self) -> None:
        """The process is dead, or about to be: fail its requests and plan a restart."""
        if not self._child.hang_up():
            return
        assert self._loop is not None
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._closed:
            if self._restart is not None:
                self._restart.cancel()
        else:
            if not self._was_ready:
                self._fail_to_start()
                return
            served = self.state == "ready" and time.monotonic() - self._ready_since >= STABLE_SECONDS
            self._deaths = 1 if served else self._deaths + 1
            self.state, self._reason = "starting", "the engine is starting again: its process died"
            self._restart = self._loop.create_task(self._restart_after_death())
        self._stats = replace(self._stats, num_waiting=0, num_running=0, num_free_blocks=self._stats.num_blocks)
        self.statistics.restart()
        self._questions.fail_all(EngineStoppedError(self._reason))
        self._requests.fail_all(self._reason)

    def _fail_to_start(self) -> None:
        """The process ended before it was ready, having said why or not."""
        code = self._child.kill()
        if self.start_error is None:
            self.start_error = died_loading(code)
        self.state, self._reason = "dead", str(self.start_error)

    async def _restart_after_death(self) -> None:
        process = self._child.process
        process.kill()  # it may have closed its socket only
        code = await asyncio.to_thread(process.wait)
        if self._deaths > MAX_RESTARTS:
            self.state = "dead"
            self._reason = f"the engine process died {self._deaths} times in a row"
            logger.error("the engine process %s; %d restarts failed: giving up", ending(code), MAX_RESTARTS)
            return
        pause = min(FIRST_PAUSE * 2 ** (self._deaths - 1), LONGEST_PAUSE)
        logger.error("the engine process %s; it is restarted in %g s", ending(code), pause)
        await asyncio.sleep(pause)
        with self._closing:
            if not self._closed:
                self._spawn()
                self.num_restarts += 1
                self._listen()


def _refusal(message: str, kind: RefusalKind) -> ValueError:
    return BusyError(message) if kind == "busy" else ValueError(message)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
