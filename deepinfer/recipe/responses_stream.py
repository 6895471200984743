"""Output -> Responses events, and the response object of a request that does not stream (recipe spec, 5)."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer.recipe.events import AnswerText, Event, ReasoningText, ToolCallArguments, ToolCallStart, new_call_id
from deepinfer.recipe.output_reader import OutputReader, TokenLogprob, Usage
from deepinfer.recipe.request import ConversationRequest
from deepinfer.recipe.tokenizer import Tokenizer

Json = dict[str, Any]
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesStream:
    """Builds the events of one response: ``start``, ``push_text`` or ``push_tokens``, ``finish``; each returns events.

    Output items follow each other: reasoning, message, function or custom tool calls; one is open at a time.
    """

    done_message: str | None = None

    def __init__(
        self,
        request: ConversationRequest,
        id: str,
        model: str,
        created: int,
        tokenizer: Tokenizer | None = None,
        new_id: Callable[[int, bool], str] = new_call_id,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.reader = OutputReader(request.parsing, tokenizer, new_id)
        self.done = False
        self._request = request
        self._id = id
        self._model = model
        self._created = created
        self._now = now
        self._sequence = 0
        self._output: list[Json] = []
        self._open: Json | None = None  # the last item of the output, while it is not done
        self._text: list[str] = []  # of the open item
        self._logprobs: list[Any] = []
        self._input: CustomInput | None = None
        self._status = "in_progress"
        self._error: Json | None = None

    @staticmethod
    def event_name(event: Json) -> str | None:
        return event["type"]

    def start(
        self, prompt_tokens: int = 0, cached_tokens: int = 0, system_fingerprint: str | None = None
    ) -> list[Json]:
        self.reader.start(prompt_tokens, cached_tokens)
        return [
            self._event("response.created", response=self.response()),
            self._event("response.in_progress", response=self.response()),
        ]

    def push_text(self, text: str, token_count: int = 0) -> list[Json]:
        """Events of the next text, which ``token_count`` tokens stand for."""
        return self._after(self.reader.push_text(text, token_count))

    def push_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> list[Json]:
        """Events of the next tokens; ``logprobs`` holds (log probability, alternatives) of each."""
        return self._after(self.reader.push_tokens(token_ids, logprobs))

    def finish(self, engine_reason: str = "stop") -> list[Json]:
        """Last events; ``engine_reason``: "stop", "length", "content_filter" or "abort" (cancelled)."""
        return self._after(self.reader.finish(engine_reason))

    def fail(self, message: str) -> list[Json]:
        """Last events of a response that cannot go on."""
        if self.done:
            return []
        self._error = {"code": "server_error", "message": message}
        events = self._close("incomplete")
        self.done, self._status = True, "failed"
        return [*events, self._event("response.failed", response=self.response())]

    def response(self) -> Json:
        """The response object as it stands."""
        reason = _INCOMPLETE.get(self.reader.finish_reason or "") if self.done else None
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": self._status,
            "background": False, "completed_at": int(self._now()) if self.done else None, "content_filters": None,
            "error": self._error, "frequency_penalty": 0.0,
            "incomplete_details": {"reason": reason} if reason else None, "max_tool_calls": None,
            "model": self._model, "moderation": None,
            "output": [dict(item) for item in self._output], "parallel_tool_calls": True, "presence_penalty": 0.0,
            "previous_response_id": None, "prompt_cache_key": None, "prompt_cache_retention": None,
            "safety_identifier": None, "service_tier": "default", "store": False, "truncation": "disabled",
            "usage": responses_usage(self.reader.usage()) if self.done else None, "metadata": {},
            **self._request.echo,
        }  # fmt: skip

    def _after(self, parsed: list[Event]) -> list[Json]:
        if self.done:
            return []
        events = [event for item in parsed for event in self._read(item)]
        if self.reader.finish_reason is not None:
            reason = self.reader.finish_reason
            status = "completed" if reason not in (*_INCOMPLETE, "abort") else "incomplete"
            events += self._close(status)
            self.done, self._status = True, "cancelled" if reason == "abort" else status
            events.append(self._event(f"response.{status}", response=self.response()))
        return events

    def _read(self, event: Event) -> list[Json]:
        match event:
            case ReasoningText(text):
                events = self._need("reasoning")
                self._text.append(text)
                return [*events, self._part_event("response.reasoning_text.delta", delta=text)]
            case AnswerText(text, logprobs):
                events = self._need("message")
                self._text.append(text)
                self._logprobs += logprobs
                return [*events, self._part_event("response.output_text.delta", delta=text, logprobs=list(logprobs))]
            case ToolCallStart(_, call_id, name):
                return [*self._close("completed", before_call=True), *self._open_call(call_id, name)]
            case ToolCallArguments(_, text):
                return self._arguments(text)

    def _need(self, kind: str) -> list[Json]:
        """Events that make an item of this kind the open one."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close("completed")
        index = len(self._output)
        if kind == "reasoning":
            item = {"id": f"rs_{self._id}_{index}", "status": "in_progress", "content": [], "summary": [],
                    "encrypted_content": f"{self._id}-{index}"}  # fmt: skip
            part: Json = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": f"msg_{self._id}_{index}", "status": "in_progress", "role": "assistant",
                    "phase": "final_answer", "content": []}  # fmt: skip
            part = _output_text("")
        events += self._add({"type": kind, **item})
        return [*events, self._part_event("response.content_part.added", part=part)]

    def _open_call(self, call_id: str, name: str) -> list[Json]:
        index = len(self._output)
        if name in self._request.custom_tools:
            self._input = CustomInput()
            return self._add({"type": "custom_tool_call", "id": f"ctc_{self._id}_{index}", "status": "in_progress",
                              "call_id": call_id, "name": name, "input": ""})  # fmt: skip
        item: Json = {"type": "function_call", "id": f"fc_{self._id}_{index}", "status": "in_progress",
                      "call_id": call_id, "name": name}  # fmt: skip
        if name in self._request.namespaces:
            item["namespace"], item["name"] = self._request.namespaces[name]
        return self._add({**item, "arguments": ""})

    def _arguments(self, text: str) -> list[Json]:
        if self._input is None:
            self._text.append(text)
            return [self._item_event("response.function_call_arguments.delta", delta=text)]
        shown = self._input.push(text)
        return [self._item_event("response.custom_tool_call_input.delta", delta=shown)] if shown else []

    def _add(self, item: Json) -> list[Json]:
        self._open = item
        self._output.append(item)
        return [self._event("response.output_item.added", item=dict(item), output_index=len(self._output) - 1)]

    def _close(self, status: str, before_call: bool = False) -> list[Json]:
        """Events that end the open item.  An answer before a call was only a comment."""
        item = self._open
        if item is None:
            return []
        text = "".join(self._text)
        item["status"] = status
        match item["type"]:
            case "reasoning":
                part: Json = {"type": "reasoning_text", "text": text}
                item["content"] = [part]
                events = [
                    self._part_event("response.reasoning_text.done", text=text),
                    self._part_event("response.content_part.done", part=part),
                ]
            case "message":
                part = {**_output_text(text), "logprobs": self._logprobs}
                item["phase"] = "commentary" if before_call else "final_answer"
                item["content"] = [part]
                events = [
                    self._part_event("response.output_text.done", text=text, logprobs=self._logprobs),
                    self._part_event("response.content_part.done", part=part),
                ]
            case "custom_tool_call":
                item["input"], unseen = self._input.finish() if self._input is not None else ("", "")
                events = [self._item_event("response.custom_tool_call_input.delta", delta=unseen)] if unseen else []
                events.append(self._item_event("response.custom_tool_call_input.done", input=item["input"]))
            case _:
                item["arguments"] = text
                events = [self._item_event("response.function_call_arguments.done", arguments=text)]
        events.append(self._event("response.output_item.done", item=dict(item), output_index=len(self._output) - 1))
        self._open, self._text, self._logprobs, self._input = None, [], [], None
        return events

    def _part_event(self, kind: str, **fields: Any) -> Json:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> Json:
        item = self._output[-1]
        return self._event(kind, item_id=item["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, **fields, "sequence_number": self._sequence}
        self._sequence += 1
        return event


class CustomInput:
    """The text input of a custom tool, out of the JSON pieces of its one string parameter ``input``."""

    _OPENING = '{"input": "'

    def __init__(self) -> None:
        self._json = ""
        self._shown: list[str] = []
        self._ended = False

    def push(self, piece: str) -> str:
        """Input text of the next piece of the arguments."""
        before = self._json
        self._json += piece
        if before != self._OPENING and not self._shown:
            return ""
        if piece == '"':  # quotes within the text come escaped
            self._ended = True
        if self._ended:
            return ""
        self._shown.append(json.loads(f'"{piece}"'))
        return self._shown[-1]

    def finish(self) -> tuple[str, str]:
        """(whole input, what of it was not yet shown): arguments of any other form are the input as they are."""
        if self._json.startswith(self._OPENING):
            return "".join(self._shown), ""
        return self._json, self._json


def _output_text(text: str) -> Json:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def responses_usage(usage: Usage) -> Json:
    """Usage as Responses reports it."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
