"""POST /v1/completions: raw text continuation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from deepinfer.outputs import TokenLogprob
from deepinfer.server.body import beside_loop, read_json, request_schema, validate
from deepinfer.server.errors import ApiError, from_value_error
from deepinfer.server.logprobs import completion_logprobs, prompt_logprobs, token_text
from deepinfer.server.protocol import CompletionRequest
from deepinfer.server.recipe_reader import Events
from deepinfer.server.state import ServerState, check_room, open_ticket, server_state, start_sequences
from deepinfer.server.streams import Answer, EventStream, collect, whole_answer
from deepinfer.server.structure import completion_structure, with_structure
from deepinfer.server.text_engine import Delta, TextReader
from deepinfer.server.usage import usage_body

router = APIRouter()
MAX_PROMPTS = 256
MAX_SEQUENCES = 1024  # prompts times n


@router.post("/v1/completions", openapi_extra=request_schema(CompletionRequest))
async def create_completion(request: Request) -> Response:
    ticket = open_ticket(request, "cmpl-")
    state = server_state(request)
    raw = await read_json(request)
    body = validate(CompletionRequest, raw)
    state.check_model(body.model)
    try:
        params = body.sampling_params(body.limit, body.logprob_count, state)
        stop = body.stop_strings
    except ValueError as error:
        raise from_value_error(error) from None
    check_room(state, params.max_tokens)
    prompts = await beside_loop(request, encode_prompts, state, body)
    params = await with_structure(request, params, completion_structure(body, raw))
    ticket = ticket.renamed(body.name)
    n = body.n or 1

    def open_reader() -> TextReader:
        return TextReader(state.text.tokenizer, stop, bool(body.include_stop_str_in_output), body.silent_roles)

    # The choices of a stream may start in any order, and each begins with its prompt.
    streams = start_sequences(state, prompts, params, n, open_reader, ticket, "prompt", scores_once=not body.stream)
    choices = [Choice(index, prompts[index // n]) for index in range(len(streams))]
    answer = CompletionAnswer(state, body, choices, ticket.answer_id)
    if body.stream:
        return EventStream(request, streams, answer, interval=body.stream_interval)
    await collect(request, streams, lambda index, delta: choices[index].add(delta))
    for choice in choices:
        choice.prompt_logprobs = choices[choice.index - choice.index % n].prompt_logprobs
    return await whole_answer(request, answer.body, answer.choices[0].prompt_logprobs is not None)


def encode_prompts(state: ServerState, body: CompletionRequest) -> list[list[int]]:
    """`prompt` as token IDs: a text, token IDs, or a list of either."""
    prompt: Any = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise ApiError(f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt")
    if len(prompt) * (body.n or 1) > MAX_SEQUENCES:
        raise ApiError(f"n times the number of prompts may be at most {MAX_SEQUENCES}", param="n")
    if "" in prompt:
        raise ApiError("prompt must not be empty", param="prompt")
    add_bos = body.add_special_tokens is not False
    encoded = [state.text.encode(one, add_bos) if isinstance(one, str) else one for one in prompt]
    return [body.truncate(token_ids, state.text.max_model_len) for token_ids in encoded]


@dataclass
class Choice:
    """One sequence of the answer: what came so far."""

    index: int
    prompt: list[int]
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    offset: int = 0  # characters of the tokens so far, for text_offset

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, delta: Delta[str]) -> Delta[str]:
        """Take a delta in; -> what of it is the answer's."""
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.pieces += delta.pieces
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        return delta


class CompletionAnswer(Answer):
    """The response object, whole or in chunks."""

    def __init__(self, state: ServerState, body: CompletionRequest, choices: list[Choice], answer_id: str):
        self.state, self.request, self.choices = state, body, choices
        self._started: set[int] = set()
        self._include_usage = body.include_usage or state.force_usage
        self.head = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": state.text.name,
            "system_fingerprint": state.fingerprint,
        }

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._choice(choice, self._echo(choice) + choice.text, choice) for choice in self.choices]
        return self.head | {"choices": choices, "usage": self.usage()}

    def add(self, number: int, delta: Delta[str]) -> Events:
        choice = self.choices[number]
        first = number not in self._started
        delta = choice.add(delta)
        text = (self._echo(choice) if first else "") + "".join(delta.pieces)
        self._started.add(number)
        chunk = self.head | {"choices": [self._choice(choice, text, delta, first)]}
        if self._include_usage:
            chunk["usage"] = None
        if self.request.continuous_usage:
            chunk["usage"] = self.usage()
        return [chunk]

    def end(self) -> Events:
        return [self.head | {"choices": [], "usage": self.usage()}] if self._include_usage else []

    def usage(self) -> dict[str, Any]:
        """Of all choices; a prompt counts once for its `n`."""
        prompts = {id(choice.prompt): len(choice.prompt) for choice in self.choices}  # a prompt counts once for its n
        return usage_body(sum(prompts.values()), sum(len(choice.token_ids) for choice in self.choices))

    def _echo(self, choice: Choice) -> str:
        return self._prompt_text(choice) if self.request.echo else ""

    def _prompt_text(self, choice: Choice) -> str:
        prompt: Any = self.request.prompt
        if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
            prompt = prompt[choice.index // (self.request.n or 1)]
        if isinstance(prompt, str) and self.request.truncate_prompt_tokens is None:
            return prompt
        return "".join(token_text(self.state.text.tokenizer, token_id) for token_id in choice.prompt)

    def _choice(self, choice: Choice, text: str, news: Choice | Delta[str], first: bool = True) -> dict[str, Any]:
        tokenizer, count = self.state.text.tokenizer, self.request.logprob_count
        logprobs = None
        if count is not None:
            token_ids: list[int] = []
            values: list[TokenLogprob | None] = []
            if self.request.echo and first:
                token_ids += choice.prompt
                values += news.prompt_logprobs or [None] * len(choice.prompt)  # none: it was aborted before
            token_ids += [item.token_id for item in news.logprobs]
            shown = len(self.request.logprob_token_ids or ()) or count
            logprobs, choice.offset = completion_logprobs(
                tokenizer, token_ids, [*values, *news.logprobs], shown, choice.offset,
                bool(self.request.return_tokens_as_token_ids),
            )  # fmt: skip
        body: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": news.finish_reason,
            "stop_reason": news.stop_reason,
        }
        likeliest = self.request.prompt_logprobs
        if likeliest is not None and first:
            found = news.prompt_logprobs
            body["prompt_logprobs"] = None if found is None else prompt_logprobs(tokenizer, found, likeliest)
        if self.request.return_token_ids:
            body["token_ids"] = news.token_ids
            if first:
                body["prompt_token_ids"] = choice.prompt
        if self.request.return_prompt_text and first:
            body["prompt_text"] = self._prompt_text(choice)
        return body
