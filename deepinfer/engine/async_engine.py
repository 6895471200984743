"""AsyncEngine: the engine loop in one background thread, requests and outputs as async generators.

Only that thread touches the engine. Callers leave commands in an inbox, which the thread empties between steps, so a
cancelled request is gone within one step. Outputs go back to the caller's event loop; a slow consumer finds them
merged.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

from deepinfer.engine.compiling import Compiling
from deepinfer.engine.engine import Engine, EngineStats
from deepinfer.engine.mailbox import Deliver, Leave, News, outputs_of
from deepinfer.engine.messages import ExpertCommand, ExpertReport, record_experts
from deepinfer.errors import EngineStoppedError
from deepinfer.observability.stats import StatsLogger
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams

logger = logging.getLogger(__name__)


class _Listener:
    """Who hears of one request, in the event loop that submitted it."""

    __slots__ = ("loop", "deliver", "has_left")

    def __init__(self, deliver: Deliver) -> None:
        self.loop = asyncio.get_running_loop()
        self.deliver = deliver
        self.has_left = False


class AsyncEngine:
    """Runs an Engine for any number of concurrent consumers, from any event loop. Use `close` when done."""

    def __init__(self, engine: Engine):
        self.max_model_len = engine.max_model_len
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, _Listener] = {}  # engine thread only
        self._is_paused = False  # engine thread only
        self._stopped: str | None = None  # why
        engine.observer.set_wake(partial(self._inbox.put, engine.before_step))
        if engine.grammars is not None:
            engine.grammars.protect()
        self._compiling = Compiling(lambda: self._inbox.put(self._compiling.enter_done))
        self._thread = threading.Thread(target=self._run, name="deepinfer-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs and takes requests."""
        return self._stopped is None

    @property
    def state(self) -> Literal["ready", "dead"]:
        """As EngineClient says it, for /health: an engine in this process runs or it is dead."""
        return "ready" if self._stopped is None else "dead"

    def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Deltas of one request until `finished`. It is queued on the first `anext`, aborted if closed or cancelled.

        A step that fails ends the request with an output whose `error` says why.

        Raises:
            ValueError: at once for an invalid prompt or parameters; from the generator if request_id is in use.
            EngineStoppedError: the engine is closed or dead.
        """
        params = sampling_params or SamplingParams()
        self.check(prompt_token_ids, params)
        return outputs_of(partial(self.submit, request_id, prompt_token_ids, params))

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """ValueError for an invalid prompt or parameters, EngineStoppedError unless requests are taken."""
        self._engine.validate(prompt_token_ids, params)
        self._check_running()

    def submit(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, deliver: Deliver
    ) -> Leave:
        """Queue a request that `check` has passed; call what is returned to end it and hear no more of it.

        `deliver` is called in the running event loop, with every output or with the exception that ends the request:
        ValueError if request_id is in use. Raises EngineStoppedError if the engine is closed or dead.
        """
        listener = _Listener(deliver)
        self._inbox.put(partial(self._add, request_id, list(prompt_token_ids), params, listener))
        self._check_running()  # after the put: a thread that died before it will not see it
        return partial(self._leave, request_id, listener)

    def _leave(self, request_id: str, listener: _Listener) -> None:
        listener.has_left = True
        self._inbox.put(partial(self._abandon, request_id, listener))

    def abort(self, request_id: str) -> None:
        """End a request from outside; its consumer gets a last output with finish reason "abort"."""
        self._inbox.put(partial(self._abort, request_id))

    async def compile(self, so_args: Mapping[str, Any]) -> None:
        """Have the grammar of structured output ready. Raises ValueError naming the field, BusyError,
        EngineStoppedError."""
        self._check_running()
        await asyncio.wrap_future(self._engine.compile(so_args))

    async def record_experts(self, command: ExpertCommand) -> ExpertReport:
        """Start, stop or show the record of how many tokens each expert got. Raises EngineStoppedError."""
        self._check_running()
        return record_experts(self._engine.observer.stats.experts, command)

    async def pause(self, pause: bool) -> None:
        """Make no step and keep what runs, or go on. Returns when no step is in progress. Raises EngineStoppedError."""
        answer: Future[None] = Future()
        self._inbox.put(partial(self._set_paused, pause, answer))
        self._check_running()  # after the put, as in `submit`
        await asyncio.wrap_future(answer)

    @property
    def device(self) -> str:
        """What the model runs on."""
        return self._engine.config.device

    def stats(self) -> EngineStats:
        """A snapshot, read without stopping the engine."""
        return self._engine.stats()

    @property
    def statistics(self) -> StatsLogger:
        """Rates over the latest seconds; any thread may read them."""
        return self._engine.observer.stats

    def close(self) -> None:
        """Stop after the step in progress; requests still running raise EngineStoppedError in their consumers."""
        self._inbox.put(None)
        self._thread.join()

    def _check_running(self) -> None:
        if self._stopped is not None:
            raise EngineStoppedError(self._stopped)

    # Below: engine thread only.

    def _run(self) -> None:
        reason = "the engine is closed"
        try:
            while self._obey_inbox():
                self._deliver(self._engine.step())
        except BaseException as error:  # a fault of the engine itself: nobody may wait for it for ever
            logger.exception("the engine loop died")
            reason = f"the engine died of {type(error).__name__}: {error}"
        self._stopped = reason
        listeners = list(self._listeners.values())
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, partial) and command.func == self._add:
                listeners.append(command.args[3])  # whatever its id: one that is in use has its own consumer
            elif isinstance(command, partial) and command.func == self._set_paused:
                if command.args[1].set_running_or_notify_cancel():
                    command.args[1].set_exception(EngineStoppedError(reason))
        for listener in listeners:
            self._call_in_loop(listener, _deliver_all, [(listener, EngineStoppedError(reason))])
        self._engine.observer.close()

    def _obey_inbox(self) -> bool:
        """Run all commands, waiting for one if the engine is idle or paused; False to stop."""
        while not self._inbox.empty() or self._is_paused or not self._engine.has_unfinished_requests():
            command = self._inbox.get()
            if command is None:
                return False
            command()
        return True

    def _set_paused(self, pause: bool, answer: Future[None]) -> None:
        self._is_paused = pause
        if answer.set_running_or_notify_cancel():
            answer.set_result(None)

    def _add(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, listener: _Listener) -> None:
        try:
            if request_id in self._listeners:  # the engine does not know those whose grammars are being compiled
                raise ValueError(f"request_id {request_id!r} is already in use")
            grammar = None
            if params.so_args is not None:
                grammar = self._engine.compile(params.so_args)
                if not grammar.done():
                    self._listeners[request_id] = listener
                    enter = partial(self._enter_compiled, request_id, prompt_token_ids, params, grammar, listener)
                    self._compiling.add(request_id, prompt_token_ids, params, grammar, enter)
                    return
            self._engine.add_request(request_id, prompt_token_ids, params, grammar)
            self._listeners[request_id] = listener
        except ValueError as error:
            self._call_in_loop(listener, _deliver_all, [(listener, error)])

    def _enter_compiled(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        grammar: Future[Any],
        listener: _Listener,
    ) -> None:
        try:
            self._engine.add_request(request_id, prompt_token_ids, params, grammar)
        except ValueError as error:
            del self._listeners[request_id]
            self._call_in_loop(listener, _deliver_all, [(listener, error)])

    def _abort(self, request_id: str) -> None:
        output = self._compiling.abort(request_id) or self._engine.abort_request(request_id)
        if output is not None:
            self._deliver([output])

    def _abandon(self, request_id: str, listener: _Listener) -> None:
        """The consumer is gone. The id may belong to another request, if this one was refused it."""
        if self._listeners.get(request_id) is listener:
            del self._listeners[request_id]
            if self._compiling.abort(request_id) is None:
                self._engine.abort_request(request_id)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand each output to its listener, with one wake-up per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Listener, RequestOutput]]] = {}
        for output in outputs:
            listener = self._listeners[output.request_id]
            by_loop.setdefault(listener.loop, []).append((listener, output))
            if output.finished:
                del self._listeners[output.request_id]
        for deliveries in by_loop.values():
            if not self._call_in_loop(deliveries[0][0], _deliver_all, deliveries):
                for listener, output in deliveries:
                    self._abandon(output.request_id, listener)

    def _call_in_loop(self, listener: _Listener, callback: Callable, argument: object) -> bool:
        """False if the consumer's event loop is closed, and so nobody listens."""
        try:
            listener.loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            return False
        return True


def _deliver_all(deliveries: Sequence[tuple[_Listener, News]]) -> None:
    for listener, news in deliveries:
        if not listener.has_left:
            listener.deliver(news)
