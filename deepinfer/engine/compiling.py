"""Requests whose grammars are being compiled: outside of the engine, so that no step waits for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from deepinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput
from deepinfer.params import SamplingParams


@dataclass(frozen=True, eq=False, slots=True)
class _Waiting:
    prompt_token_ids: list[int]
    params: SamplingParams
    grammar: Future[Any]
    enter: Callable[[], None]


class Compiling:
    """Used by the engine's thread, except that `wake` is called by the one that compiled."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: dict[str, _Waiting] = {}
        self._done: deque[tuple[str, _Waiting]] = deque()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        grammar: Future[Any],
        enter: Callable[[], None],
    ) -> None:
        """`enter` will be called by `enter_done`, when the grammar is there or has failed."""
        waiting = self._waiting[request_id] = _Waiting(prompt_token_ids, params, grammar, enter)

        def done(_: Future[Any]) -> None:
            self._done.append((request_id, waiting))
            self._wake()

        grammar.add_done_callback(done)

    def enter_done(self) -> None:
        """Let requests enter whose grammar is there or has failed; in the engine's thread."""
        while self._done:
            request_id, waiting = self._done.popleft()
            if self._waiting.get(request_id) is waiting:  # else it was aborted, and its id may have been used again
                del self._waiting[request_id]
                waiting.enter()

    def abort(self, request_id: str) -> RequestOutput | None:
        """The last output of a request that waits here; None if it does not."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return None
        waiting.grammar.cancel()  # it is the request's own: others may wait for the same
        outputs = [CompletionOutput(index, finish_reason="abort") for index in range(waiting.params.n)]
        return RequestOutput(request_id, waiting.prompt_token_ids, outputs, True, RequestMetrics(time.monotonic()))
