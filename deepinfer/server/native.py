"""POST /generate, SGLang's native route: a text or token IDs in, text, token IDs and `meta_info` out."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from deepinfer.outputs import TokenLogprob
from deepinfer.server.body import beside_loop, read_json, request_schema, validate
from deepinfer.server.completions import Choice, encode_prompts
from deepinfer.server.errors import ApiError, from_value_error
from deepinfer.server.logprobs import finite, token_text
from deepinfer.server.protocol import NOT_SAMPLED, CompletionRequest, RequestName, Texts, TokenIds
from deepinfer.server.recipe_reader import Events
from deepinfer.server.running import Ticket
from deepinfer.server.sequences import RunningSequence
from deepinfer.server.sizes import check_sizes
from deepinfer.server.state import ServerState, check_room, open_ticket, server_state, start_sequences
from deepinfer.server.streams import Answer, EventStream, collect, encode_json, whole_answer
from deepinfer.server.structure import completion_structure, with_structure
from deepinfer.server.text_engine import Delta, TextReader

router = APIRouter()
DEFAULT_MAX_NEW_TOKENS = 128

# Names of sampling_params that Completions has, too, and those that it spells differently.
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "stop",
    "stop_token_ids", "ignore_eos", "n", "logit_bias", "skip_special_tokens", "spaces_between_special_tokens",
    "json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "custom_logit_processor",
)  # fmt: skip
_SPELLED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
} | {name: name for name in _SAME}
_THEIRS = {ours: theirs for theirs, ours in _SPELLED.items()}
_TOP = ("lora_path", "return_hidden_states", "return_routed_experts", "data_parallel_rank")


class GenerateRequest(BaseModel):
    """One prompt or a list of them: `text`, or `input_ids`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[tuple, str]]] = {name: NOT_SAMPLED[name] for name in _TOP} | {
        "input_embeds": ((), "send text or input_ids"),
        "image_data": ((), "only text is read so far"),
        "audio_data": ((), "only text is read so far"),
        "video_data": ((), "only text is read so far"),
        "session_params": ((), "send the whole prompt"),
        "token_ids_logprob": (([],), "ask for top_logprobs_num"),
    }
    model_config = ConfigDict(strict=True)

    text: str | Texts | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=20)] | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None  # of the prompt, from which token on; -1: none
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    rid: RequestName | None = None
    priority: int | None = None  # here a higher one goes first

    def completion(self, model: str) -> CompletionRequest:
        """The same as a Completions request.  ApiError 400 naming the field in this route's own terms."""
        if (self.text is None) == (self.input_ids is None):
            raise ApiError("exactly one of text and input_ids must be given", param="text")
        given = self.sampling_params or {}
        unknown = sorted(given.keys() - _SPELLED.keys())
        if unknown:
            message = f"sampling_params: unknown name {unknown[0][:200]!r}; known are {', '.join(_SPELLED)}"
            raise ApiError(message, param="sampling_params")
        body = {_SPELLED[name]: value for name, value in given.items()}
        body.setdefault("max_tokens", DEFAULT_MAX_NEW_TOKENS)
        if self.priority is not None:
            body["priority"] = -self.priority
        body |= {"model": model, "prompt": self.input_ids if self.text is None else self.text}
        if self.return_logprob:
            body["logprobs"] = self.top_logprobs_num or 0
            if self.has_prompt_logprobs:
                body["prompt_logprobs"] = self.top_logprobs_num or 0
        return validate(CompletionRequest, body)

    @property
    def has_prompt_logprobs(self) -> bool:
        return bool(self.return_logprob) and self.logprob_start_len not in (None, -1)

    @property
    def is_list(self) -> bool:
        """Whether the answer is a list: one entry a prompt."""
        prompts = self.text if self.input_ids is None else self.input_ids
        return isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int))


@router.post("/generate", openapi_extra=request_schema(GenerateRequest))
async def generate(request: Request) -> Response:
    """Answers of a list of prompts, or of `n` above 1, come as a list; streamed, each carries its `index`."""
    ticket = open_ticket(request, "gen-")
    state = server_state(request)
    body = validate(GenerateRequest, await read_json(request))
    check_sizes(state.text, body.sampling_params or {})
    ticket = ticket.renamed(body.rid)
    try:
        choices, streams = await start(request, body.completion(state.text.name), ticket)
    except ApiError as error:
        raise in_own_terms(error, "input_ids" if body.text is None else "text") from None
    answer = NativeAnswer(state, body, choices, ticket.request_id)
    if body.stream:
        return EventStream(request, streams, answer)
    await collect(request, streams, lambda index, delta: answer.choices[index].add(delta))
    return await whole_answer(request, answer.body, answer.choices[0].prompt_logprobs is not None)


async def start(
    request: Request, completion: CompletionRequest, ticket: Ticket
) -> tuple[list[Choice], list[RunningSequence[str]]]:
    """The sequences of a completion.  ApiError naming the field in the terms of Completions."""
    state = server_state(request)
    try:
        params = completion.sampling_params(completion.max_tokens, completion.logprob_count, state)
        stop = completion.stop_strings
    except ValueError as error:
        raise from_value_error(error) from None
    check_room(state, params.max_tokens)
    prompts = await beside_loop(request, encode_prompts, state, completion)
    asked = completion_structure(completion, {"response_format": completion.response_format})
    params = await with_structure(request, params, asked)
    n = completion.n or 1

    def open_reader() -> TextReader:
        return TextReader(
            state.text.tokenizer, stop, bool(completion.include_stop_str_in_output), completion.silent_roles
        )

    streams = start_sequences(state, prompts, params, n, open_reader, ticket, "prompt")
    return [Choice(index, prompts[index // n]) for index in range(len(streams))], streams


def in_own_terms(error: ApiError, prompt: str) -> ApiError:
    """The error with this route's name of the field in place of that of Completions."""
    ours = error.param or ""
    if ours == "prompt":
        theirs = error.param = prompt
    elif ours in _THEIRS:
        theirs = _THEIRS[ours]
        error.param = f"sampling_params.{theirs}"
    else:
        return error
    error.message = error.message.replace(ours, theirs, 1)
    return error


class NativeAnswer(Answer):
    """What came so far of every sequence, and how this route says it."""

    def __init__(self, state: ServerState, body: GenerateRequest, choices: list[Choice], name: str):
        self.state, self.request, self.choices, self.name = state, body, choices, name
        self.began = time.monotonic()
        self._inputs: dict[int, dict[str, msgspec.Raw]] = {}  # by choice

    @property
    def is_list(self) -> bool:
        return self.request.is_list or len(self.choices) > 1

    def body(self) -> Any:
        entries = [self.entry(choice) for choice in self.choices]
        return entries if self.is_list else entries[0]

    def add(self, number: int, delta: Delta[str]) -> Events:
        """Each event holds all of its sequence so far."""
        self.choices[number].add(delta)
        return [self.entry(self.choices[number]) | ({"index": number} if self.is_list else {})]

    def entry(self, choice: Choice) -> dict[str, Any]:
        """All of a sequence so far, in the words of this route."""
        reason: dict[str, Any] | None = None
        if choice.finish_reason is not None:
            reason = {"type": choice.finish_reason}
            if choice.finish_reason == "length":
                reason["length"] = len(choice.token_ids)
            elif choice.finish_reason == "stop":
                reason["matched"] = choice.token_ids[-1] if choice.stop_reason is None else choice.stop_reason
        meta: dict[str, Any] = {
            "id": self.name if not self.is_list else f"{self.name}-{choice.index}",
            "finish_reason": reason,
            "prompt_tokens": len(choice.prompt),
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": 0,
            "weight_version": "default",
            "e2e_latency": time.monotonic() - self.began,
        }
        if self.request.return_logprob:
            meta["output_token_logprobs"] = [self._logprob(i.logprob, i.token_id) for i in choice.logprobs]
            if self.request.top_logprobs_num:
                meta["output_top_logprobs"] = [self._top(item) for item in choice.logprobs]
        if self.request.has_prompt_logprobs and choice.prompt_logprobs is not None:
            if choice.index not in self._inputs:  # every event has them: they are made once
                self._inputs[choice.index] = self._input(choice.prompt, choice.prompt_logprobs)
            meta |= self._inputs[choice.index]
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}

    def _input(self, prompt: list[int], logprobs: list[TokenLogprob | None]) -> dict[str, msgspec.Raw]:
        """What is said of the prompt's tokens, as JSON."""
        found = list(zip(prompt, logprobs, strict=True))[self.request.logprob_start_len or 0 :]
        values = [(token_id, None if item is None else item.logprob) for token_id, item in found]
        said: dict[str, Any] = {"input_token_logprobs": [self._logprob(value, token_id) for token_id, value in values]}
        if self.request.top_logprobs_num:
            said["input_top_logprobs"] = [None if item is None else self._top(item) for _, item in found]
        return {name: msgspec.Raw(encode_json(value)) for name, value in said.items()}

    def _top(self, item: TokenLogprob) -> list[list[Any]]:
        return [self._logprob(value, token_id) for token_id, value in item.top]

    def _logprob(self, value: float | None, token_id: int) -> list[Any]:
        text = token_text(self.state.text.tokenizer, token_id) if self.request.return_text_in_logprobs else None
        return [None if value is None else finite(value), token_id, text]
