"""What every route needs, and how a request's sequences are checked and started."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from fastapi import Request

from deepinfer.params import MAX_SEED, SamplingParams
from deepinfer.server.errors import ApiError, from_value_error
from deepinfer.server.metrics import Metrics, SequenceClock
from deepinfer.server.text_engine import Delta, Piece, Reader, TextEngine


@dataclass
class ServerState:
    """`default_thinking` decides for chat requests that do not say whether to think."""

    text: TextEngine
    metrics: Metrics
    api_keys: tuple[str, ...] = ()
    default_thinking: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.text.name:
            message = f"model must be {self.text.name!r}, got {name[:200]!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")


def server_state(request: Request) -> ServerState:
    return request.app.state.server


def check_prompt(state: ServerState, prompt: Sequence[int], max_tokens: int | None, param: str) -> None:
    """ApiError 400 if the prompt and the answer asked for cannot fit into the context."""
    limit = state.text.max_model_len
    if not prompt:
        raise ApiError(f"{param} must not be empty", param=param)
    if len(prompt) >= limit or len(prompt) + (max_tokens or 0) > limit:
        asked = f" and max_tokens asks for {max_tokens} more" if max_tokens else ""
        raise ApiError(
            f"{param} has {len(prompt)} tokens{asked}; this model's context holds {limit} tokens, prompt and answer",
            param="max_tokens" if max_tokens and len(prompt) < limit else param,
            code="context_length_exceeded",
        )


def start_sequences(
    state: ServerState,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    n: int,
    reader: Callable[[], Reader[Piece]],
    arrival: float,
    param: str,
) -> list[AsyncGenerator[Delta[Piece], None]]:
    """`n` sequences of each prompt, in order of their choice index.  Nothing runs before the first is iterated.

    Every prompt is checked first, so that a bad one is a 400 (naming `param`) and nothing has started.
    """
    streams = []
    for prompt in prompts:
        check_prompt(state, prompt, params.max_tokens, param)
        for choice in range(n):
            # Choices of one request are separate requests to the engine: each can stop at its own stop string.
            seed = None if params.seed is None else (params.seed + choice) % (MAX_SEED + 1)
            try:
                stream = state.text.stream(prompt, replace(params, seed=seed), reader())
            except ValueError as error:
                refused = from_value_error(error)
                refused.param = param if refused.param == "prompt_token_ids" else refused.param
                raise refused from None
            streams.append(_observed(state, stream, arrival))
    for prompt in prompts:
        state.metrics.admit(len(prompt), n, params.max_tokens)
    return streams


async def _observed(
    state: ServerState, stream: AsyncGenerator[Delta[Piece], None], arrival: float
) -> AsyncGenerator[Delta[Piece], None]:
    """The stream of one sequence, measured."""
    clock = SequenceClock(state.metrics, arrival)
    reason, times = "abort", None  # the reason if the generator is closed early
    try:
        async with aclosing(stream):
            async for delta in stream:
                if delta.token_ids:
                    clock.tokens(len(delta.token_ids))
                reason, times = delta.finish_reason or reason, delta.metrics
                yield delta
    except Exception:
        reason = "error"
        raise
    finally:
        clock.end(reason, times)
