"""The sequences of one request, from admission to their end: measured, known as running, left when nobody listens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic

from deepinfer.engine.mailbox import Deliver, Leave, News
from deepinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput
from deepinfer.params import SamplingParams
from deepinfer.server.admission import Place
from deepinfer.server.errors import ApiError, from_value_error
from deepinfer.server.metrics import Longest, SequenceClock
from deepinfer.server.running import Ticket
from deepinfer.server.text_engine import Delta, EngineError, Piece, Reader, read_completion
from deepinfer.structured.matcher import STRUCTURED_OUTPUT

if TYPE_CHECKING:
    from deepinfer.server.state import ServerState


class RunningSequence(Generic[Piece]):
    """One sequence that was let in.  Call `start` once, `read` with all that is delivered, and `close` in any case."""

    def __init__(
        self,
        state: ServerState,
        prompt: Sequence[int],
        params: SamplingParams,
        reader: Reader[Piece],
        ticket: Ticket,
        engine_id: str,
        place: Place,
        longest: Longest,
    ):
        """`engine_id` (unique) is what `engine.abort` takes; `longest` knows of all answers to the prompt."""
        self.ended = False
        self._state, self._prompt, self._params, self._reader = state, prompt, params, reader
        self._ticket, self._engine_id, self._place, self._longest = ticket, engine_id, place, longest
        self._clock: SequenceClock | None = None
        self._leave: Leave | None = None
        self._times: RequestMetrics | None = None
        self._written: list[int] = []  # for the log, if that has them

    @property
    def must_wait(self) -> bool:
        """Whether the server is paused: then `wait_and_start`."""
        return self._state.gate.is_closed

    def start(self, deliver: Deliver) -> None:
        """Queue it in the engine.  Raises EngineStoppedError."""
        self._register()
        self._leave = self._state.text.engine.submit(self._engine_id, self._prompt, self._params, deliver)

    async def wait_and_start(self, deliver: Deliver) -> None:
        """Start once the gate is open.  One that is turned away there ends like one that was aborted."""
        self._register()
        if not await self._state.gate.passed(self._engine_id):
            aborted = [CompletionOutput(0, finish_reason="abort")]
            times = RequestMetrics(time.monotonic())
            deliver(RequestOutput(self._engine_id, list(self._prompt), aborted, True, times))
            return
        try:
            self.start(deliver)
        except Exception as error:
            deliver(error)

    def _register(self) -> None:
        if self._clock is None:
            self._clock = SequenceClock(self._state.metrics, self._longest, self._ticket.arrival)
            self._state.running.add(self._engine_id, self._ticket)

    def read(self, news: News) -> Delta[Piece]:
        """What was delivered, as text.  A stop string ends the sequence in the engine, too.

        Raises what was delivered if it is an exception, EngineError when a step of this sequence failed, ApiError when
        the engine refused it or its grammar cannot go on.
        """
        try:
            if isinstance(news, ValueError):  # the engine refused what the server let through
                raise from_value_error(news)
            if isinstance(news, Exception):
                raise news
            if news.error:
                if news.error.startswith(STRUCTURED_OUTPUT):  # what the request asked for together is impossible
                    raise ApiError(news.error)
                raise EngineError(news.error)
            delta = read_completion(self._state.text.tokenizer, news.outputs[0], self._reader)
        except Exception:
            # A protocol that has no word for an abort raises one, too.
            aborted = isinstance(news, RequestOutput) and any(o.finish_reason == "abort" for o in news.outputs)
            self._end("abort" if aborted else "error")
            raise
        delta.metrics = self._times = news.metrics
        delta.prompt_logprobs = news.prompt_logprobs
        if self._state.content_log.outputs:
            self._written += delta.token_ids
        if delta.token_ids and self._clock is not None:
            self._clock.tokens(len(delta.token_ids))
            if self._ticket.facts.ttft is None:
                self._ticket.facts.ttft = self._clock.last - self._ticket.arrival
        if delta.finish_reason is not None:
            if news.finished:
                self._leave = None
            self._end(delta.finish_reason)
        return delta

    def close(self) -> None:
        """Nobody listens any more.  Its cache is freed within one step."""
        self._end("abort")

    def _end(self, reason: str) -> None:
        if self._leave is not None:
            self._leave()
            self._leave = None
        if not self.ended and self._clock is not None:
            self._state.running.remove(self._engine_id)
            self._clock.end(reason, self._times)
            self._ticket.facts.completion_tokens += self._clock.count
            self._state.content_log.answered(self._ticket.request_id, self._state.text.tokenizer, self._written, reason)
        self._place.leave()
        self.ended = True
