"""Engine plus tokenizer: token IDs of a prompt in, pieces of text out.  Shared by the server, `generate` and `chat`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from deepinfer.checkpoint_tokenizer import load_tokenizer
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.client import EngineClient
from deepinfer.engine.model_path import PACKAGED_MODELS, resolve_model
from deepinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprob
from deepinfer.params import SamplingParams
from deepinfer.recipe import Detokenizer, StopStrings, Tokenizer
from deepinfer.recipe.conversation import ModelVersion
from deepinfer.recipe.detokenizer import SILENT_ROLES

if TYPE_CHECKING:
    from deepinfer.engine.async_engine import AsyncEngine

Piece = TypeVar("Piece")
Piece_co = TypeVar("Piece_co", covariant=True)


class EngineError(RuntimeError):
    """The engine could not finish a request that was valid."""


class Reader(Protocol[Piece_co]):
    """Makes pieces of output from the tokens of one sequence: strings for completions, chunks for chat."""

    def push(self, token_id: int, logprob: TokenLogprob | None) -> tuple[Piece_co, str | None]:
        """(what became certain with this token, stop string that ends the sequence here)."""
        ...

    def finish(self, reason: str) -> Piece_co:
        """What was held back, when the engine ends the sequence: "stop", "length" or "abort"."""
        ...


@dataclass(slots=True)
class Delta(Generic[Piece]):
    """News of one sequence: its new tokens, and the pieces that became certain (they may lag behind the tokens).

    Nothing behind a stop string is in it.  `finish_reason` is set on the last delta: "stop", "length" or "abort".
    `stop_reason` is the stop string or stop token ID that ended it; None for end-of-sequence.
    """

    token_ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # once, with the first token


class TextReader:
    """Plain text that ends before a stop string, or with it if `include_stop`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        silent_roles: Sequence[str] = SILENT_ROLES,
    ):
        self.detokenizer = Detokenizer(tokenizer, silent_roles)
        self.stops = StopStrings(list(stop), include_stop)

    def push(self, token_id: int, logprob: TokenLogprob | None) -> tuple[str, str | None]:
        return self.stops.push(self.detokenizer.push([token_id]))

    def finish(self, reason: str) -> str:
        return self.stops.push(self.detokenizer.finish())[0] + self.stops.finish()


def read_completion(tokenizer: Tokenizer, completion: CompletionOutput, reader: Reader[Piece]) -> Delta[Piece]:
    """New tokens as the reader makes text of them."""
    token_ids, logprobs = completion.token_ids, completion.logprobs or []
    pieces: list[Piece] = []
    for number, token_id in enumerate(token_ids):
        if token_id >= tokenizer.vocab_size:
            continue  # a model's vocabulary may be padded beyond the tokenizer's: such tokens have no text
        piece, stop = reader.push(token_id, logprobs[number] if logprobs else None)
        pieces.append(piece)
        if stop is not None:
            return Delta(token_ids[: number + 1], pieces, logprobs[: number + 1], "stop", stop)
    reason = completion.finish_reason
    if reason is not None:
        pieces.append(reader.finish(reason))
    return Delta(token_ids, pieces, logprobs, reason, completion.stop_reason)


class TextEngine:
    """What a text protocol needs of a model.  `name` is what clients call it."""

    def __init__(
        self, engine: AsyncEngine | EngineClient, tokenizer: Tokenizer, name: str, model_version: ModelVersion = "v4.1"
    ):
        self.engine, self.tokenizer, self.name, self.model_version = engine, tokenizer, name, model_version

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token IDs of plain text: spellings of control tokens in it stay text."""
        bos = [self.tokenizer.control_id("bos")] if add_bos else []
        return bos + self.tokenizer.encode_texts([text])[0]

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, reader: Reader[Piece], request_id: str | None = None
    ) -> AsyncGenerator[Delta[Piece], None]:
        """Generate one sequence.  Closing the generator, or a stop string, frees its cache within one step.

        `request_id` (unique; made up if absent) is what `engine.abort` takes.
        Raises ValueError at once for a prompt or parameters that the engine refuses; EngineStoppedError when it has
        died.  The generator raises EngineError when a step of this request failed.
        """
        return self._read(self.engine.generate(request_id or uuid.uuid4().hex, prompt, params), reader)

    async def _read(
        self, outputs: AsyncGenerator[RequestOutput, None], reader: Reader[Piece]
    ) -> AsyncGenerator[Delta[Piece], None]:
        async with aclosing(outputs):
            async for output in outputs:
                if output.error:
                    raise EngineError(output.error)
                for completion in output.outputs:
                    delta = read_completion(self.tokenizer, completion, reader)
                    delta.metrics = output.metrics
                    yield delta
                    if delta.finish_reason is not None:
                        return


def load_text_engine(model: str, config: EngineConfig, name: str | None = None) -> TextEngine:
    """Load a checkpoint and start its engine in a thread.  Raises ValueError for a bad model, config or checkpoint."""
    from deepinfer.engine.async_engine import (
        AsyncEngine,  # here, because a server with an engine process needs no torch
    )
    from deepinfer.engine.loading import load_engine

    tokenizer = load_tokenizer(resolve_model(model))
    engine = AsyncEngine(load_engine(model, config))
    return TextEngine(engine, tokenizer, name or model_name(model), tokenizer.model_version)


def start_text_engine(
    model: str,
    config: EngineConfig,
    name: str | None = None,
    log_level: str = "warning",
    log_format: str = "text",
    threads: int | None = None,
) -> TextEngine:
    """The same with an engine in a process of its own, which is loading the model when this returns.

    It gets so many processor `threads`; see `engine.child.default_threads`.

    Raises ValueError for a bad model path or tokenizer; what else may be wrong, `EngineClient.start_error` tells later.
    """
    tokenizer = load_tokenizer(resolve_model(model))
    engine = EngineClient(model, config, log_level, wait=False, log_format=log_format, threads=threads)
    return TextEngine(engine, tokenizer, name or model_name(model), tokenizer.model_version)


def model_name(model: str) -> str:
    """`nano`, or the last part of a folder's path."""
    return model if model in PACKAGED_MODELS else Path(model).resolve().name
