"""One sequence's output as every protocol reads it: tokens or text in, parser events and usage out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.recipe.detokenizer import Detokenizer
from deepinfer.recipe.events import Event, new_call_id
from deepinfer.recipe.request import ParsingOptions
from deepinfer.recipe.stream_parser import StreamParser
from deepinfer.recipe.tokenizer import Tokenizer

# Log probability of a token, and of its likeliest alternatives as (token ID, log probability).
TokenLogprob = tuple[float, Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Usage:
    """Token counts.  ``reasoning_tokens`` is None when not thinking, or unknown without a tokenizer."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None


class OutputReader:
    """Feeds a StreamParser and counts what goes by.  Tokens after a stop string are not counted."""

    def __init__(
        self,
        options: ParsingOptions,
        tokenizer: Tokenizer | None = None,
        new_id: Callable[[int, bool], str] = new_call_id,
    ) -> None:
        self.parser = StreamParser(options, new_id)
        self.finish_reason: str | None = None
        self.names_tokens_by_id = False  # in log probabilities: "token_id:42" for the token's text
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, options.silent_roles) if tokenizer is not None else None
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is still held back
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._completion_tokens = 0

    def start(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._prompt_tokens, self._cached_tokens = prompt_tokens, cached_tokens

    def push_text(self, text: str, token_count: int = 0, logprobs: Sequence[Any] = ()) -> list[Event]:
        """Events of the next text, which ``token_count`` tokens stand for.  Nothing once the output has ended."""
        if self.finish_reason is not None:
            return []
        self._completion_tokens += token_count
        events = self.parser.push(text, logprobs)
        if self.parser.stopped:
            self.finish_reason = "stop"
        return events

    def push_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> list[Event]:
        """Events of the next tokens.  Raises ValueError without a tokenizer, or when log probabilities are missing."""
        if self._tokenizer is None or self._detokenizer is None:
            raise ValueError("token IDs need a tokenizer")
        if logprobs is not None and len(logprobs) != len(token_ids):
            raise ValueError(
                f"invalid log probabilities: {len(logprobs)} log probabilities for {len(token_ids)} token IDs"
            )
        text, ready = "", []
        for i, token_id in enumerate(token_ids):
            if logprobs is not None:
                self._logprobs.append(self._record(self._tokenizer, token_id, logprobs[i]))
            shown = self._detokenizer.push((token_id,))
            if shown:
                text += shown
                ready += self._logprobs
                self._logprobs = []
        return self.push_text(text, len(token_ids), ready)

    def push_plain(self, token_id: int) -> str:
        """The short way of most tokens: the text that ``push_tokens`` would give as one event, without building it.

        "" for a token that must go the long way; then nothing has changed.
        """
        if self._detokenizer is None or self.finish_reason is not None or self._logprobs:
            return ""
        text = self._detokenizer.plain(token_id)
        if not text or not self.parser.take_plain(text):
            return ""
        self._completion_tokens += 1
        return text

    def _record(self, tokenizer: Tokenizer, token_id: int, logprob: TokenLogprob) -> dict[str, Any]:
        record = logprob_record(tokenizer, token_id, *logprob)
        if self.names_tokens_by_id:
            record["token"] = f"token_id:{token_id}"
            for entry, (other, _) in zip(record["top_logprobs"], logprob[1], strict=True):
                entry["token"] = f"token_id:{other}"
        return record

    def finish(self, engine_reason: str = "stop") -> list[Event]:
        """Events at the end of the output.  Bytes of a character that was cut off are dropped."""
        if self.finish_reason is not None:
            return []
        events = self.parser.finish(engine_reason)
        self.finish_reason = self.parser.finish_reason(engine_reason)
        return events

    def usage(self) -> Usage:
        reasoning = None
        if self.parser.options.thinking_initial_stage is not None and self._tokenizer is not None:
            reasoning = len(self._tokenizer.encode_text(self.parser.reasoning))
        return Usage(self._prompt_tokens, self._cached_tokens, self._completion_tokens, reasoning)


def logprob_record(
    tokenizer: Tokenizer, token_id: int, logprob: float, top: Sequence[tuple[int, float]] = ()
) -> dict[str, Any]:
    """One token as the OpenAI protocols report it, with its alternatives."""
    return {
        **_token_record(tokenizer, token_id, logprob),
        "top_logprobs": [_token_record(tokenizer, other, value) for other, value in top],
    }


def _token_record(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.bytes_of(token_id)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:  # a part of a character
        text = "".join(f"\\x{byte:02x}" for byte in data)
    return {"token": text, "logprob": logprob, "bytes": list(data)}
