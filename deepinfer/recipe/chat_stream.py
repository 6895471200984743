"""Output -> Chat Completions chunks, and the response of a request that does not stream (recipe spec, 5)."""

from collections.abc import Callable, Sequence
from typing import Any

from deepinfer.recipe.events import AnswerText, Event, ReasoningText, ToolCallArguments, ToolCallStart, new_call_id
from deepinfer.recipe.output_reader import OutputReader, TokenLogprob, Usage
from deepinfer.recipe.request import ConversationRequest
from deepinfer.recipe.tokenizer import Tokenizer

Chunk = dict[str, Any]


class ChatStream:
    """Builds the chunks of one choice: ``start``, ``push_text`` or ``push_tokens``, ``finish``; each returns chunks.

    ``done`` is True after the last chunk, which a stop string may bring before ``finish``.
    """

    done_message: str | None = "[DONE]"

    def __init__(
        self,
        request: ConversationRequest,
        id: str,
        model: str,
        created: int,
        tokenizer: Tokenizer | None = None,
        index: int = 0,
        new_id: Callable[[int, bool], str] = new_call_id,
    ) -> None:
        self.reader = OutputReader(request.parsing, tokenizer, new_id)
        self.done = False
        self._stage = request.parsing.thinking_initial_stage
        self._begins_with_reasoning = request.parsing.begins_with_reasoning
        self._usage_field = request.include_usage or not request.stream
        self._head = {"id": id, "created": created, "model": model}
        self._fingerprint: str | None = None
        self._index = index
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []  # of each call
        self._logprobs: dict[str, list[Any]] = {}

    def start(
        self, prompt_tokens: int = 0, cached_tokens: int = 0, system_fingerprint: str | None = None
    ) -> list[Chunk]:
        self.reader.start(prompt_tokens, cached_tokens)
        self._fingerprint = system_fingerprint
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        if self._stage == "ContentContinuation":
            delta["reasoning_content"] = None
        elif self._stage is not None:
            delta.update(content=None, reasoning_content="")
        return [self._chunk(delta)]

    def push_text(self, text: str, token_count: int = 0) -> list[Chunk]:
        """Chunks of the next text, which ``token_count`` tokens stand for."""
        return self._after(self.reader.push_text(text, token_count))

    def push_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> list[Chunk]:
        """Chunks of the next tokens; ``logprobs`` holds (log probability, alternatives) of each."""
        return self._after(self.reader.push_tokens(token_ids, logprobs))

    def finish(self, engine_reason: str = "stop") -> list[Chunk]:
        """Last chunks; ``engine_reason``: "stop", "length" or "content_filter"."""
        return self._after(self.reader.finish(engine_reason))

    @staticmethod
    def event_name(chunk: Chunk) -> str | None:
        """Name of the server-sent event: chunks have none."""
        return None

    def response(self) -> dict[str, Any]:
        """The whole answer as a chat.completion object."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._begins_with_reasoning:
            message["reasoning_content"] = self.reader.parser.reasoning
        if self._calls:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": "".join(pieces)}}
                for call, pieces in zip(self._calls, self._arguments, strict=True)
            ]
        choice = {
            "index": self._index,
            "message": message,
            "logprobs": self._logprobs or None,
            "finish_reason": self.reader.finish_reason,
        }
        head = {"id": self._head["id"], "object": "chat.completion", **self._head}
        usage = chat_usage(self.reader.usage())
        return {**head, "choices": [choice], "usage": usage, "system_fingerprint": self._fingerprint}

    def _after(self, events: list[Event]) -> list[Chunk]:
        if self.done:
            return []
        chunks = [*map(self._event_chunk, events)]
        if self.reader.finish_reason is not None:
            self.done = True
            last = self._chunk(self._text_delta("content", ""), finish_reason=self.reader.finish_reason)
            chunks.append({**last, "usage": chat_usage(self.reader.usage())})
        return chunks

    def _event_chunk(self, event: Event) -> Chunk:
        match event:
            case AnswerText(text, logprobs):
                self._content.append(text)
                return self._text_chunk("content", text, logprobs)
            case ReasoningText(text, logprobs):
                return self._text_chunk("reasoning_content", text, logprobs)
            case ToolCallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                entry = {"index": index, "id": call_id, "type": "function", "function": function}
                self._calls.append({**entry, "function": dict(function)})
                self._arguments.append([])
                return self._chunk({"tool_calls": [entry]})
            case ToolCallArguments(index, text):
                self._arguments[index].append(text)
                return self._chunk({"tool_calls": [{"index": index, "function": {"arguments": text}}]})

    def _text_delta(self, key: str, text: str) -> dict[str, Any]:
        if self._stage is None:
            return {key: text}
        return {"content": None, "reasoning_content": None, key: text}

    def text_chunk(self, key: str, text: str) -> Chunk:
        """The chunk of a text of the answer ("content") or of reasoning ("reasoning_content"); changes nothing."""
        return self._chunk(self._text_delta(key, text))

    def _text_chunk(self, key: str, text: str, logprobs: Sequence[Any]) -> Chunk:
        if not logprobs:
            return self.text_chunk(key, text)
        self._logprobs.setdefault(key, []).extend(logprobs)
        return self._chunk(self._text_delta(key, text), {key: list(logprobs)})

    def _chunk(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> Chunk:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk: Chunk = {
            "id": self._head["id"],
            "object": "chat.completion.chunk",
            **self._head,
            "system_fingerprint": self._fingerprint,
            "choices": [choice],
        }
        return {**chunk, "usage": None} if self._usage_field else chunk


def chat_usage(usage: Usage) -> dict[str, Any]:
    """Usage as Chat Completions reports it, with DeepSeek's cache counts."""
    out: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        out["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    out["prompt_cache_hit_tokens"] = usage.cached_tokens
    out["prompt_cache_miss_tokens"] = usage.prompt_tokens - usage.cached_tokens
    return out
