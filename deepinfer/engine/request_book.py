"""RequestBook: the requests in progress, and the ways in which they end: done, aborted, too late, failed."""

from __future__ import annotations

import time

from deepinfer.engine.collect import News, why_invalid
from deepinfer.engine.deadlines import Deadlines
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.observability.observer import Observer
from deepinfer.outputs import CompletionOutput, FinishReason, RequestOutput
from deepinfer.params import SamplingParams
from deepinfer.structured.matcher import GRAMMAR_LIMIT


class RequestBook:
    """
    Args:
        scheduler: frees what sequences hold when they end.
        observer: hears when the first request comes, and when the last one has ended.
    """

    def __init__(self, scheduler: Scheduler, observer: Observer) -> None:
        self.requests: dict[str, Request] = {}
        self._scheduler = scheduler
        self._observer = observer
        self._deadlines = Deadlines()

    def check_new(self, request_id: str) -> None:
        """Raise ValueError if the id is in use."""
        if request_id in self.requests:
            raise ValueError(f"request_id {request_id!r} is already in use")

    def add(self, request: Request, params: SamplingParams) -> None:
        """Its sequences are queued."""
        if not self.requests:
            self._observer.guard(self._observer.work_began)
        self.requests[request.request_id] = request
        if params.deadline_seconds is not None:
            self._deadlines.add(request.request_id, request.metrics.arrival_time + params.deadline_seconds)

    def forget(self, request_id: str) -> None:
        """None of its sequences is left."""
        self.requests.pop(request_id).metrics.finished_time = time.monotonic()
        self._deadlines.remove(request_id)
        if not self.requests:
            self._observer.guard(self._observer.work_ended)

    def finish(self, news: News) -> list[RequestOutput]:
        """Free what the finished sequences of a step hold, end the requests that are done, and fail the invalid ones.

        Returns the news of the step.
        """
        if news.finished:
            self._scheduler.remove(news.finished)
            for request_id in {seq.request_id for seq in news.finished}:
                if self.requests[request_id].finished:
                    self.forget(request_id)
                    news.outputs[request_id].finished = True
        return [*news.outputs.values(), *self._end_invalid(news.invalid)]

    def abort(self, request_id: str, index: int | None) -> RequestOutput | None:
        """End a request, or only its completion `index`. None if it is unknown or has ended."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        sequences = [s for s in request.sequences if s.finish_reason is None and index in (None, s.index)]
        return self._close(request, sequences, "abort") if sequences else None

    def end_expired(self) -> list[RequestOutput]:
        """Requests past their deadline end with what they have, like aborted ones."""
        outputs = []
        for request_id in self._deadlines.expired(time.monotonic()):
            request = self.requests[request_id]
            late = [s for s in request.sequences if s.finish_reason is None]
            outputs.append(self._close(request, late, "abort", stop_reason="deadline"))
        return outputs

    def fail(self, sequences: list[Sequence], error: str) -> list[RequestOutput]:
        """End every request that owns one of the sequences, as far as they have not ended, with reason "error"."""
        owners = dict.fromkeys(seq.request_id for seq in sequences if seq.finish_reason is None)
        requests = [self.requests[request_id] for request_id in owners]
        return [
            self._close(request, [s for s in request.sequences if s.finish_reason is None], "error", error)
            for request in requests
        ]

    def _end_invalid(self, sequences: list[Sequence]) -> list[RequestOutput]:
        """Rows without a finite largest logit: the model's fault, or nothing was left that all settings allow.

        Where a grammar has become too complex, what was written is right, and ends as it is.
        """
        outputs = []
        for seq in sequences:
            if seq.finish_reason is None and seq.constraint is not None and seq.constraint.exhausted:
                outputs.append(self._close(self.requests[seq.request_id], [seq], "length", stop_reason=GRAMMAR_LIMIT))
            else:  # one may have ended with another one of its request
                outputs += self.fail([seq], why_invalid(seq))
        return outputs

    def _close(
        self,
        request: Request,
        sequences: list[Sequence],
        reason: FinishReason,
        error: str | None = None,
        stop_reason: str | None = None,
    ) -> RequestOutput:
        """Finish these unfinished sequences of a request now."""
        for seq in sequences:
            seq.finish_reason = reason
        self._scheduler.remove(sequences)
        outputs = [CompletionOutput(seq.index, finish_reason=reason, stop_reason=stop_reason) for seq in sequences]
        if request.finished:
            self.forget(request.request_id)
        return RequestOutput(
            request.request_id, request.prompt_token_ids, outputs, request.finished, request.metrics, error
        )
