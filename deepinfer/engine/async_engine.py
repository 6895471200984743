"""AsyncEngine: the engine loop in one background thread, requests and outputs as async generators.

Only that thread touches the engine. Callers leave commands in an inbox, which the thread empties between steps, so a
cancelled request is gone within one step. Outputs go back to the caller's event loop; a slow consumer finds them
merged.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Literal

from deepinfer.engine.engine import Engine, EngineStats
from deepinfer.errors import EngineStoppedError
from deepinfer.observability.stats import StatsLogger
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams

logger = logging.getLogger(__name__)


class _Stream:
    """Outputs of one request on their way to its consumer; used in the consumer's event loop only."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ready = asyncio.Event()
        self.pending: RequestOutput | None = None
        self.error: Exception | None = None

    def push(self, output: RequestOutput) -> None:
        if self.pending is None:
            self.pending = output
        else:
            self.pending.merge(output)
        self.ready.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.ready.set()

    async def pop(self) -> RequestOutput:
        await self.ready.wait()
        self.ready.clear()
        output, self.pending = self.pending, None
        if output is None:
            assert self.error is not None
            raise self.error
        if self.error is not None:
            self.ready.set()
        return output


class AsyncEngine:
    """Runs an Engine for any number of concurrent consumers, from any event loop. Use `close` when done."""

    def __init__(self, engine: Engine):
        self.max_model_len = engine.max_model_len
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # engine thread only
        self._stopped: str | None = None  # why
        engine.observer.set_wake(partial(self._inbox.put, engine.before_step))
        self._thread = threading.Thread(target=self._run, name="deepinfer-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._stopped is None

    @property
    def state(self) -> Literal["ready", "dead"]:
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
        self._engine.validate(prompt_token_ids, params)
        self._check_running()
        return self._generate(request_id, list(prompt_token_ids), params)

    async def _generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        stream = _Stream()
        self._inbox.put(partial(self._add, request_id, prompt_token_ids, params, stream))
        finished = False
        try:
            self._check_running()  # after the put: a thread that died before it will not see it
            while not finished:
                output = await stream.pop()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._inbox.put(partial(self._abandon, request_id, stream))

    def abort(self, request_id: str) -> None:
        """End a request from outside; its consumer gets a last output with finish reason "abort"."""
        self._inbox.put(partial(self._abort, request_id))

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
        streams = list(self._streams.values())
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, partial) and command.func == self._add:
                streams.append(command.args[3])  # whatever its id: one that is in use has its own consumer
        for stream in streams:
            self._call_in_loop(stream, stream.fail, EngineStoppedError(reason))
        self._engine.observer.close()

    def _obey_inbox(self) -> bool:
        """Run all commands, waiting for one if the engine is idle; False to stop."""
        while not self._inbox.empty() or not self._engine.has_unfinished_requests():
            command = self._inbox.get()
            if command is None:
                return False
            command()
        return True

    def _add(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, stream: _Stream) -> None:
        try:
            self._engine.add_request(request_id, prompt_token_ids, params)
            self._streams[request_id] = stream
        except ValueError as error:
            self._call_in_loop(stream, stream.fail, error)

    def _abort(self, request_id: str) -> None:
        output = self._engine.abort_request(request_id)
        if output is not None:
            self._deliver([output])

    def _abandon(self, request_id: str, stream: _Stream) -> None:
        """The consumer is gone. The id may belong to another stream, if this one was refused it."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._engine.abort_request(request_id)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand each output to its stream, with one wake-up per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams[output.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, output))
            if output.finished:
                del self._streams[output.request_id]
        for deliveries in by_loop.values():
            if not self._call_in_loop(deliveries[0][0], _push_all, deliveries):
                for stream, output in deliveries:
                    self._abandon(output.request_id, stream)

    def _call_in_loop(self, stream: _Stream, callback: Callable, argument: object) -> bool:
        """False if the consumer's event loop is closed, and so nobody listens."""
        try:
            stream.loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            return False
        return True


def _push_all(deliveries: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in deliveries:
        stream.push(output)
