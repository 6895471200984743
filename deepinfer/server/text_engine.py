"""Engine plus tokenizer: token IDs of a prompt in, pieces of text out.  Shared by the server, `generate` and `chat`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.async_engine import AsyncEngine
from deepinfer.engine.loading import PACKAGED_MODELS, load_engine, resolve_model
from deepinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprob
from deepinfer.params import SamplingParams
from deepinfer.recipe import Detokenizer, StopStrings, Tokenizer
from deepinfer.recipe.conversation import ModelVersion


class EngineError(RuntimeError):
    """The engine could not finish a request that was valid."""


@dataclass
class TextDelta:
    """News of one sequence: its new tokens, and the text that is certain now (it may lag behind the tokens).

    `finish_reason` is set on the last delta: "stop", "length" or "abort".  `stop_reason` is the stop string or stop
    token ID that ended it; None for end-of-sequence.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None


class TextEngine:
    """What a text protocol needs of a model.  `name` is what clients call it."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, name: str, model_version: ModelVersion = "v4.1"):
        self.engine, self.tokenizer, self.name, self.model_version = engine, tokenizer, name, model_version

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token IDs of plain text: spellings of control tokens in it stay text."""
        bos = [self.tokenizer.control_id("bos")] if add_bos else []
        return bos + self.tokenizer.encode_text(text)

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, stop: Sequence[str] = ()
    ) -> AsyncGenerator[TextDelta, None]:
        """Generate one sequence.  Closing the generator, or a stop string, frees its cache within one step.

        Raises ValueError at once for a prompt or parameters that the engine refuses; EngineStoppedError when it has
        died.  The generator raises EngineError when a step of this request failed.
        """
        outputs = self.engine.generate(uuid.uuid4().hex, prompt, params)
        return self._texts(outputs, _TextOutput(Detokenizer(self.tokenizer), StopStrings(list(stop))))

    async def _texts(
        self, outputs: AsyncGenerator[RequestOutput, None], text: _TextOutput
    ) -> AsyncGenerator[TextDelta, None]:
        async with aclosing(outputs):
            async for output in outputs:
                if output.error:
                    raise EngineError(output.error)
                for completion in output.outputs:
                    delta = text.push(completion)
                    delta.metrics = output.metrics
                    yield delta
                    if delta.finish_reason is not None:
                        return


def load_text_engine(model: str, config: EngineConfig, name: str | None = None) -> TextEngine:
    """Load a checkpoint and start its engine thread.  Raises ValueError for a bad model, config or checkpoint."""
    path = resolve_model(model)
    config_text = (path / "config.json").read_text()
    version: ModelVersion = "v4" if '"deepseek_v4"' in config_text else "v4.1"  # V4 prompts are written differently
    tokenizer = Tokenizer.from_file(path / "tokenizer.json", version)
    return TextEngine(AsyncEngine(load_engine(model, config)), tokenizer, name or model_name(model), version)


def model_name(model: str) -> str:
    """`nano`, or the last part of a folder's path."""
    return model if model in PACKAGED_MODELS else Path(model).resolve().name


class _TextOutput:
    """Tokens of one sequence to text; tokens behind a stop string are cut from IDs and log-probabilities too."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings):
        self.detokenizer, self.stops = detokenizer, stops

    def push(self, completion: CompletionOutput) -> TextDelta:
        delta = TextDelta(finish_reason=completion.finish_reason, stop_reason=completion.stop_reason)
        for position, token_id in enumerate(completion.token_ids):
            delta.token_ids.append(token_id)
            if completion.logprobs:
                delta.logprobs.append(completion.logprobs[position])
            if self._add(delta, self.detokenizer.push([token_id])):
                return delta
        if completion.finish_reason is not None and not self._add(delta, self.detokenizer.finish()):
            delta.text += self.stops.finish()
        return delta

    def _add(self, delta: TextDelta, text: str) -> bool:
        """Append what may be shown of `text`; True once a stop string matched."""
        visible, matched = self.stops.push(text)
        delta.text += visible
        if matched is not None:
            delta.finish_reason, delta.stop_reason = "stop", matched
        return matched is not None
