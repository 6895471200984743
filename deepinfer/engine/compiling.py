"""Requests whose grammars are being compiled: outside of the engine, so that no step waits for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from deepinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput
from deepinfer.params import SamplingParams


class Compiling:
    """Used by the engine's thread, except that `wake` is called by the one that compiled."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: dict[str, tuple[list[int], SamplingParams, Callable[[], None]]] = {}
        self._done: deque[str] = deque()

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
        self._waiting[request_id] = (prompt_token_ids, params, enter)

        def done(_: Future[Any]) -> None:
            self._done.append(request_id)
            self._wake()

        grammar.add_done_callback(done)

    def enter_done(self) -> None:
        while self._done:
            entry = self._waiting.pop(self._done.popleft(), None)
            if entry is not None:  # else it was aborted
                entry[2]()

    def abort(self, request_id: str) -> RequestOutput | None:
        """The last output of a request that waits here; None if it does not."""
        entry = self._waiting.pop(request_id, None)
        if entry is None:
            return None
        prompt_token_ids, params, _ = entry
        outputs = [CompletionOutput(index, finish_reason="abort") for index in range(params.n)]
        return RequestOutput(request_id, prompt_token_ids, outputs, True, RequestMetrics(time.monotonic()))
