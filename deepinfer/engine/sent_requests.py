"""The requests that an engine process works on, known by numbers that are never used twice."""

from __future__ import annotations

from typing import NamedTuple

from deepinfer.engine.mailbox import Deliver
from deepinfer.engine.messages import Output, PromptPart, output_from_wire, prompt_from_wire
from deepinfer.errors import EngineStoppedError
from deepinfer.outputs import TokenLogprob


class _Request(NamedTuple):
    request_id: str
    prompt_token_ids: list[int]
    deliver: Deliver
    prompt_logprobs: list[TokenLogprob | None]  # what has come of them


class SentRequests:
    """Who hears of each request. News of one that is over, or whose consumer has left, reach nobody."""

    def __init__(self) -> None:
        self._requests: dict[int, _Request] = {}
        self._numbers: dict[str, int] = {}
        self._next_number = 0

    def add(self, request_id: str, prompt_token_ids: list[int], deliver: Deliver) -> int:
        """The number of a new request. Raises ValueError if the id is in use."""
        if request_id in self._numbers:
            raise ValueError(f"request_id {request_id!r} is already in use")
        number = self._next_number
        self._next_number += 1
        self._requests[number] = _Request(request_id, prompt_token_ids, deliver, [])
        self._numbers[request_id] = number
        return number

    def number_of(self, request_id: str) -> int | None:
        """None if no request in progress has the id."""
        return self._numbers.get(request_id)

    def forget(self, number: int) -> bool:
        """The request is over. False if it was already."""
        request = self._requests.pop(number, None)
        if request is not None:
            del self._numbers[request.request_id]
        return request is not None

    def add_prompt_part(self, part: PromptPart) -> None:
        """Keep it for the output with the request's first token."""
        request = self._requests.get(part.number)
        if request is not None:
            known = request.prompt_logprobs
            known += prompt_from_wire(part.prompt_logprobs, request.prompt_token_ids[len(known) :])

    def deliver(self, output: Output) -> None:
        """Hand news to whoever waits for them; a finished request is over."""
        request = self._requests.get(output.number)
        if request is None:
            return
        if output.finished:
            self.forget(output.number)
        request.deliver(output_from_wire(output, request.request_id, request.prompt_token_ids, request.prompt_logprobs))

    def refuse(self, number: int, error: Exception) -> None:
        """The request ends with this error."""
        request = self._requests.get(number)
        if request is not None:
            self.forget(number)
            request.deliver(error)

    def fail_all(self, reason: str) -> None:
        """The engine has stopped: all requests end with an EngineStoppedError."""
        requests, self._requests, self._numbers = self._requests, {}, {}
        for request in requests.values():
            request.deliver(EngineStoppedError(reason))
