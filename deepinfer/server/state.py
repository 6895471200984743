"""What every route needs, and how a request's sequences are checked and started."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fastapi import Request

from deepinfer.engine.client import EngineState
from deepinfer.params import MAX_SEED, SamplingParams
from deepinfer.server.admission import Admission, Limits
from deepinfer.server.content_log import ContentLog
from deepinfer.server.errors import ApiError, from_value_error
from deepinfer.server.gate import Gate
from deepinfer.server.metrics import Longest, Metrics
from deepinfer.server.response_store import ResponseStore
from deepinfer.server.running import RunningRequests, Ticket
from deepinfer.server.sequences import RunningSequence
from deepinfer.server.text_engine import Piece, Reader, TextEngine
from deepinfer.server.workers import Workers


@dataclass
class ServerState:
    """`default_thinking` decides for requests that do not say whether to think; `sampling_defaults` are what the model
    recommends for those that say nothing of sampling; `engine_config` is for /server_info, `fingerprint` for answers.

    While `draining`, requests in progress go on and new ones are refused.  `background` holds the tasks of responses
    that nobody waits for.
    """

    text: TextEngine
    metrics: Metrics
    api_keys: tuple[str, ...] = ()
    default_thinking: bool = False
    engine_config: dict[str, Any] = field(default_factory=dict)
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None
    responses: ResponseStore = field(default_factory=ResponseStore)
    draining: bool = False
    limits: Limits = field(default_factory=Limits)
    created: int = field(default_factory=lambda: int(time.time()))
    background: set[asyncio.Task[None]] = field(default_factory=set)
    workers: Workers = field(default_factory=Workers)
    content_log: ContentLog = field(default_factory=ContentLog)
    quiet_paths: frozenset[str] = frozenset()  # no line in the log for requests of them
    force_usage: bool = False  # streams end with their usage, whether asked for or not
    stream_interval: int = 1  # tokens of a sequence that an event of a stream waits for

    def __post_init__(self) -> None:
        self.gate = Gate()
        self.running = RunningRequests(self.abort)
        self.admission = Admission(self.limits, self.metrics)

    @property
    def condition(self) -> EngineState | Literal["draining"]:
        return "draining" if self.draining else self.text.engine.state

    def abort(self, engine_id: str) -> None:
        """End a sequence, wherever it is."""
        if not self.gate.turn_away(engine_id):
            self.text.engine.abort(engine_id)

    async def end_pause(self) -> None:
        """What stood still goes on, and what waits runs."""
        self.gate.open()
        if self.text.engine.state == "ready":  # one that was started again meanwhile is not paused
            await self.text.engine.pause(False)

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for a model that is not served."""
        if name is not None and name != self.text.name:
            message = f"model must be {self.text.name!r}, got {name[:200]!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    def check_serving(self) -> None:
        """ApiError 503 while the engine is not running, or the server is about to stop."""
        condition = self.condition
        if condition == "draining":
            raise ApiError("the server is shutting down", status=503)
        if condition != "ready":
            raise ApiError(self.why_not_ready, status=503)

    @property
    def why_not_ready(self) -> str:
        return getattr(self.text.engine, "reason", "the engine is not running")

    def check_loaded(self) -> None:
        """ApiError 503 until the model has been loaded once: before, its limits are unknown."""
        if self.text.max_model_len == 0:
            raise ApiError(self.why_not_ready, status=503)


def server_state(request: Request) -> ServerState:
    """What the application keeps for all requests."""
    return request.app.state.server


def open_ticket(request: Request, prefix: str) -> Ticket:
    """The ticket of a request that has just arrived; its answer's id starts with `prefix`.

    ApiError 429 if the queue is full, 503 until the model is loaded.
    """
    server_state(request).check_loaded()
    server_state(request).admission.check_queue()
    answer_id = prefix + uuid.uuid4().hex
    request_id = getattr(request.state, "request_id", answer_id)
    ticket = Ticket(owner_of(request), request_id, answer_id, time.monotonic())
    request.state.facts = ticket.facts
    return ticket


def owner_of(request: Request) -> str:
    """What tells the request's API key from others; "" without keys."""
    return getattr(request.state, "owner", "")


def check_prompt(
    state: ServerState, prompt: Sequence[int], max_tokens: int | None, param: str, limit_param: str = "max_tokens"
) -> None:
    """ApiError 400 if the prompt and the answer asked for cannot fit into the context."""
    limit = state.text.max_model_len
    if not prompt:
        raise ApiError(f"{param} must not be empty", param=param)
    if len(prompt) + (1 if max_tokens is None else max_tokens) > limit:
        asked = f" and {limit_param} asks for {max_tokens} more" if max_tokens else ""
        raise ApiError(
            f"{param} has {len(prompt)} tokens{asked}; this model's context holds {limit} tokens, prompt and answer",
            param=limit_param if max_tokens and len(prompt) < limit else param,
            code="context_length_exceeded",
        )


def check_room(state: ServerState, max_tokens: int | None, param: str = "max_tokens") -> None:
    """ApiError 400 if the answer asked for fills the context by itself; costs nothing, so ask before encoding."""
    limit = state.text.max_model_len
    if max_tokens is not None and max_tokens >= limit:
        message = f"{param} asks for {max_tokens} tokens; this model's context holds {limit}, prompt and answer"
        raise ApiError(message, param=param, code="context_length_exceeded")


def start_sequences(
    state: ServerState,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    n: int,
    reader: Callable[[], Reader[Piece]],
    ticket: Ticket,
    param: str,
    scores_once: bool = False,
) -> list[RunningSequence[Piece]]:
    """`n` sequences of each prompt, in order of their choice index.  Nothing runs before `streams.Generation.run`.

    Every prompt is checked first, so that a bad one is a 400 (naming `param`) and nothing has started.
    scores_once: of the n only the first brings the log-probabilities of the prompt.
    """
    state.check_serving()
    places = iter(state.admission.admit(ticket, len(prompts) * n))
    sequences = []
    for prompt in prompts:
        check_prompt(state, prompt, params.max_tokens, param)
        longest = Longest(state.metrics, n)
        for choice in range(n):
            # Choices of one request are separate requests to the engine: each can stop at its own stop string.
            seed = None if params.seed is None else (params.seed + choice) % (MAX_SEED + 1)
            asked = None if scores_once and choice else params.prompt_logprobs
            one = replace(params, seed=seed, prompt_logprobs=asked)
            try:
                state.text.engine.check(prompt, one)
            except ValueError as error:
                refused = from_value_error(error)
                refused.param = param if refused.param == "prompt_token_ids" else refused.param
                raise refused from None
            engine_id = uuid.uuid4().hex
            sequences.append(RunningSequence(state, prompt, one, reader(), ticket, engine_id, next(places), longest))
    ticket.facts.prompt_tokens = sum(map(len, prompts))
    for prompt in prompts:
        state.metrics.admit(len(prompt), n, params.max_tokens)
    return sequences
