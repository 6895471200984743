"""Output -> Messages events, and the message of a request that does not stream (recipe spec, 5)."""

from collections.abc import Callable, Sequence
from typing import Any

from deepinfer.recipe import json_text
from deepinfer.recipe.events import AnswerText, Event, ReasoningText, ToolCallArguments, ToolCallStart, new_call_id
from deepinfer.recipe.output_reader import OutputReader, TokenLogprob, Usage
from deepinfer.recipe.request import ConversationRequest
from deepinfer.recipe.tokenizer import Tokenizer

Json = dict[str, Any]
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_TEXT_OF = {"thinking": "thinking", "text": "text"}


class MessagesStream:
    """Builds the events of one message: ``start``, ``push_text`` or ``push_tokens``, ``finish``; each returns events.

    Content blocks follow each other: thinking, text, tool uses; one is open at a time.
    """

    done_message: str | None = None

    def __init__(
        self,
        request: ConversationRequest,
        id: str,
        model: str,
        created: int = 0,
        tokenizer: Tokenizer | None = None,
        new_id: Callable[[int, bool], str] = new_call_id,
    ) -> None:
        self.reader = OutputReader(request.parsing, tokenizer, new_id)
        self.done = False
        self._begins_with_reasoning = request.parsing.begins_with_reasoning
        self._id = id
        self._model = model
        self._content: list[Json] = []
        self._is_open = False
        self._text: list[str] = []  # of the open block
        self._pinged = False

    @staticmethod
    def event_name(event: Json) -> str | None:
        return event["type"]

    def start(
        self, prompt_tokens: int = 0, cached_tokens: int = 0, system_fingerprint: str | None = None
    ) -> list[Json]:
        self.reader.start(prompt_tokens, cached_tokens)
        events = [{"type": "message_start", "message": self.response()}]
        if self._begins_with_reasoning:
            events += self._need("thinking")
        return events

    def push_text(self, text: str, token_count: int = 0) -> list[Json]:
        """Events of the next text, which ``token_count`` tokens stand for."""
        return self._after(self.reader.push_text(text, token_count))

    def push_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> list[Json]:
        """Events of the next tokens; the protocol has no log probabilities, they are ignored."""
        return self._after(self.reader.push_tokens(token_ids))

    def finish(self, engine_reason: str = "stop") -> list[Json]:
        """Last events; ``engine_reason``: "stop", "length" or "content_filter"."""
        return self._after(self.reader.finish(engine_reason))

    def response(self) -> Json:
        """The message as it stands."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [dict(block) for block in self._content],
            **self._stop(),
            "usage": messages_usage(self.reader.usage()),
        }

    def _stop(self) -> Json:
        stop = self.reader.parser.stop_string
        if not self.done:
            return {"stop_reason": None, "stop_sequence": None}
        reason = "stop_sequence" if stop is not None else _STOP_REASONS[self.reader.finish_reason or "stop"]
        return {"stop_reason": reason, "stop_sequence": stop}

    def _after(self, parsed: list[Event]) -> list[Json]:
        if self.done:
            return []
        events = [event for item in parsed for event in self._read(item)]
        if self.reader.finish_reason is not None:
            events += self._close()
            self.done = True
            usage = messages_usage(self.reader.usage())
            events += [{"type": "message_delta", "delta": self._stop(), "usage": usage}, {"type": "message_stop"}]
        return events

    def _read(self, event: Event) -> list[Json]:
        match event:
            case ReasoningText(text):
                return [*self._need("thinking"), self._delta("thinking_delta", "thinking", text)]
            case AnswerText(text):
                return [*self._need("text"), self._delta("text_delta", "text", text)]
            case ToolCallStart(_, call_id, name):
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return [*self._close(), *self._open(block)]
            case ToolCallArguments(_, text):
                return [self._delta("input_json_delta", "partial_json", text)]

    def _need(self, kind: str) -> list[Json]:
        """Events that make a block of this kind the open one."""
        if self._is_open and self._content[-1]["type"] == kind:
            return []
        block: Json = {"type": kind, _TEXT_OF[kind]: ""}
        if kind == "thinking":
            block["signature"] = ""
        return [*self._close(), *self._open(block)]

    def _open(self, block: Json) -> list[Json]:
        self._is_open = True
        self._content.append(block)
        index = len(self._content) - 1
        events: list[Json] = [{"type": "content_block_start", "index": index, "content_block": dict(block)}]
        if not self._pinged:
            self._pinged = True
            events.append({"type": "ping"})
        return events

    def _delta(self, kind: str, key: str, text: str) -> Json:
        self._text.append(text)
        return self._delta_event({"type": kind, key: text})

    def _delta_event(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _close(self) -> list[Json]:
        """Events that end the open block."""
        if not self._is_open:
            return []
        block, text = self._content[-1], "".join(self._text)
        events = []
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[_TEXT_OF[block["type"]]] = text
        if block["type"] == "thinking":
            block["signature"] = self._id
            events.append(self._delta_event({"type": "signature_delta", "signature": self._id}))
        events.append({"type": "content_block_stop", "index": len(self._content) - 1})
        self._is_open, self._text = False, []
        return events


def _input(arguments: str) -> Any:
    """Arguments as an object; a call that was cut off, or is not JSON, has none."""
    try:
        value = json_text.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def messages_usage(usage: Usage) -> Json:
    """Usage as Messages reports it: input tokens without the cached ones."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
    }
