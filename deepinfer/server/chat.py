"""POST /v1/chat/completions: messages to a prompt by deepinfer.recipe, the output back to a message."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from deepinfer.outputs import TokenLogprob
from deepinfer.recipe import ChatStream, ConversationRequest, convert_chat_request
from deepinfer.server.body import beside_loop, read_json, request_schema, validate
from deepinfer.server.errors import ApiError, from_value_error
from deepinfer.server.logprobs import prompt_logprobs
from deepinfer.server.prompts import PreparedPrompt, prepare, with_thinking_budget
from deepinfer.server.protocol import ChatRequest
from deepinfer.server.recipe_reader import Events, RecipeReader
from deepinfer.server.state import ServerState, check_room, open_ticket, server_state, start_sequences
from deepinfer.server.streams import Answer, EventStream, collect, encode_json, line_of, whole_answer
from deepinfer.server.structure import asked_structure, conversation_structure, holds_answer, with_structure
from deepinfer.server.text_engine import Delta
from deepinfer.server.usage import usage_body

Chunk = dict[str, Any]

router = APIRouter()


def prepare_chat(state: ServerState, raw: dict[str, Any], continues: bool = False) -> PreparedPrompt:
    """Messages to token IDs.  ApiError 400 naming the field for whatever recipe refuses.

    The answer `continues` the last message, as that message's own `"prefix": true` asks for.
    """
    if continues:
        *earlier, last = raw["messages"]
        raw = raw | {"messages": [*earlier, last | {"prefix": True}]}
    value = raw.get("response_format")
    if isinstance(value, dict) and value.get("type") == "structural_tag":  # not recipe's: see structure.py
        raw = raw | {"response_format": None}
    return prepare(state, raw | _thinking_of_template(raw), convert_chat_request, "messages")


def _thinking_of_template(raw: dict[str, Any]) -> dict[str, Any]:
    """vLLM clients switch thinking by chat_template_kwargs: {"thinking": true} or {"enable_thinking": true}."""
    options = raw.get("chat_template_kwargs")
    if options is None or "thinking" in raw:
        return {}
    known = ("thinking", "enable_thinking")
    if not isinstance(options, dict) or not all(key in known and isinstance(options[key], bool) for key in options):
        message = f"chat_template_kwargs may hold {' or '.join(known)}, true or false"
        raise ApiError(message, param="chat_template_kwargs")
    return {"thinking": {"type": "enabled" if any(options.values()) else "disabled"}} if options else {}


@router.post("/v1/chat/completions", openapi_extra=request_schema(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    ticket = open_ticket(request, "chatcmpl-")
    state = server_state(request)
    raw = await read_json(request)
    body = validate(ChatRequest, raw)
    state.check_model(body.model)
    try:
        check_room(state, body.limit, body.limit_name)
        params = body.sampling_params(body.limit, body.logprob_count, state)
        stop = body.stop_strings
    except ValueError as error:
        raise from_value_error(error) from None
    ticket = ticket.renamed(body.name)
    prepared = await beside_loop(request, prepare_chat, state, raw, body.continues)
    asked = asked_structure(body, raw)
    parallel = body.parallel_tool_calls is not False
    params = with_thinking_budget(state, params, body.thinking_token_budget, prepared.conversation)
    ends_thinking = params.thinking_token_budget is not None
    structure = await beside_loop(
        request, conversation_structure, state, prepared.conversation, asked, "response_format", parallel, ends_thinking
    )
    params = await with_structure(request, params, structure)
    is_structured, silent = holds_answer(asked), body.silent_roles
    conversation = prepared.with_output(stop, body.include_stop_str_in_output, is_structured, silent)
    answer = ChatAnswer(state, body, prepared, conversation, ticket.answer_id)
    streams = start_sequences(
        state, [prepared.token_ids], params, body.n or 1, answer.open_choice, ticket, "messages", scores_once=True
    )
    if body.stream:
        return EventStream(request, streams, answer, interval=body.stream_interval)
    await collect(request, streams, lambda index, delta: answer.choices[index].add(delta))
    return await whole_answer(request, answer.body, answer.choices[0].prompt_logprobs is not None)


class ChatChoice(RecipeReader[ChatStream]):
    """One answer."""

    announced = 0  # token IDs that chunks have carried so far
    lines: tuple[list[bytes], list[bytes]] | None = None  # of a chunk with text of the answer, or of reasoning

    def push(self, token_id: int, logprob: TokenLogprob | None) -> tuple[Events, str | None]:
        """Most tokens of a stream are nothing but text: their chunk differs from the last one in the text alone."""
        if self.lines is not None and logprob is None:
            text = self.stream.reader.push_plain(token_id)
            if text:
                return [encode_json(text).join(self.lines[self.stream.reader.parser.is_reasoning])], None
        return super().push(token_id, logprob)


class ChatAnswer(Answer):
    """The response object, whole or in chunks."""

    def __init__(
        self,
        state: ServerState,
        body: ChatRequest,
        prepared: PreparedPrompt,
        conversation: ConversationRequest,
        answer_id: str,
    ):
        self.state, self.request, self.prepared, self.conversation = state, body, prepared, conversation
        self.choices: list[ChatChoice] = []
        self.id, self.created = answer_id, int(time.time())
        # Looked at for every token.
        self._continuous_usage = body.continuous_usage
        self._include_usage = body.include_usage or state.force_usage
        self._echo = text_of(body.messages[-1]) if body.echo and continues_last(body) else ""
        self._hides_reasoning, self._return_token_ids = body.include_reasoning is False, bool(body.return_token_ids)

    def open_choice(self) -> ChatChoice:
        """The reader of the next choice."""
        text = self.state.text
        stream = ChatStream(self.conversation, self.id, text.name, self.created, text.tokenizer, len(self.choices))
        stream.reader.names_tokens_by_id = bool(self.request.return_tokens_as_token_ids)
        choice = ChatChoice(stream)
        self.choices.append(choice)
        if self.request.stream and not (self._continuous_usage or self._hides_reasoning or self._return_token_ids):
            choice.lines = self._line(choice, "content"), self._line(choice, "reasoning_content")
        return choice

    def _line(self, choice: ChatChoice, key: str) -> list[bytes]:
        """The line of a chunk with nothing but text, cut where the text stands as JSON."""
        return line_of(self._finished(choice, choice.stream.text_chunk(key, "\0"))).split(b'"\\u0000"')

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        responses = [choice.stream.response() for choice in self.choices]
        for choice, response in zip(self.choices, responses, strict=True):
            self._show_reasoning(response["choices"][0], "message")
            message = response["choices"][0]["message"]
            message["content"] = self._echo + (message["content"] or "") if self._echo else message["content"]
            self._add_extras(choice, response["choices"][0])
        whole = responses[0] | {"choices": [response["choices"][0] for response in responses], "usage": self.usage()}
        whole |= self._prompt() | {"system_fingerprint": self.state.fingerprint}
        count = self.request.prompt_logprobs
        if count is not None:
            tokenizer, found = self.state.text.tokenizer, self.choices[0].prompt_logprobs
            whole["prompt_logprobs"] = None if found is None else prompt_logprobs(tokenizer, found, count)
        return whole

    def begin(self) -> Events:
        events: list[Chunk] = []
        for choice in self.choices:
            first = choice.stream.start(len(self.prepared.token_ids))
            events += [self._finished(choice, chunk) | self._prompt() for chunk in first]
            if self._echo:
                events.append(self._finished(choice, choice.stream.text_chunk("content", self._echo)))
        return events

    def add(self, number: int, delta: Delta[Events]) -> Events:
        choice = self.choices[number]
        chunks = choice.add(delta)
        if self._hides_reasoning:
            chunks = [chunk for chunk in chunks if isinstance(chunk, bytes) or not _is_reasoning(chunk)]
        return [chunk if isinstance(chunk, bytes) else self._finished(choice, chunk) for chunk in chunks]

    def end(self) -> Events:
        if not self._include_usage:
            return []
        head = {"id": self.id, "object": "chat.completion.chunk", "created": self.created}
        head |= {"model": self.state.text.name, "system_fingerprint": self.state.fingerprint}
        return [head | {"choices": [], "usage": self.usage()}]

    def usage(self, final: bool = True) -> dict[str, Any]:
        """Of all choices; the prompt counts once.  Reasoning is counted at the end: that costs its whole length."""
        reasoning = [choice.stream.reader.usage().reasoning_tokens if final else None for choice in self.choices]
        known = [count for count in reasoning if count is not None]
        completion = sum(len(choice.token_ids) for choice in self.choices)
        return usage_body(len(self.prepared.token_ids), completion, sum(known) if known else None)

    def _finished(self, choice: ChatChoice, chunk: Chunk) -> Chunk:
        """Recipe's chunk with what OpenAI and vLLM clients expect around it."""
        chunk.pop("usage", None)
        chunk["system_fingerprint"] = self.state.fingerprint
        if self._continuous_usage:
            chunk["usage"] = self.usage(final=False)
        elif self._include_usage:
            chunk["usage"] = None
        entry = chunk["choices"][0]
        self._show_reasoning(entry, "delta")
        self._add_extras(choice, entry)
        return chunk

    def _show_reasoning(self, entry: dict[str, Any], key: str) -> None:
        """Also under vLLM's name, or not at all; `key` is where the text is: "message" or "delta"."""
        said = entry[key]
        if self._hides_reasoning:
            said.pop("reasoning_content", None)
            if entry["logprobs"]:
                entry["logprobs"].pop("reasoning_content", None)
        elif "reasoning_content" in said:
            said["reasoning"] = said["reasoning_content"]

    def _add_extras(self, choice: ChatChoice, entry: dict[str, Any]) -> None:
        entry["stop_reason"] = choice.stop_reason if entry["finish_reason"] else None
        if self._return_token_ids:
            entry["token_ids"] = choice.token_ids[choice.announced :]
            choice.announced = len(choice.token_ids)

    def _prompt(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.request.return_token_ids:
            found["prompt_token_ids"] = self.prepared.token_ids
        if self.request.return_prompt_text:
            found["prompt_text"] = self.prepared.prompt.text
        return found


def continues_last(body: ChatRequest) -> bool:
    """Whether the answer goes on from an assistant message at the end, asked for in either way."""
    last = body.messages[-1]
    return last.get("role") == "assistant" and bool(body.continue_final_message or last.get("prefix"))


def text_of(message: dict[str, Any]) -> str:
    """The text of a message that recipe has accepted."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _is_reasoning(chunk: Chunk) -> bool:
    """Whether this chunk brings nothing but reasoning."""
    entry = chunk["choices"][0]
    return bool(entry["delta"].get("reasoning_content")) and entry["finish_reason"] is None
