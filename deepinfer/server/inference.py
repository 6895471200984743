"""POST /inference/v1/generate, vLLM's route for token IDs in and token IDs out, as a router or a trainer calls it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from deepinfer.outputs import TokenLogprob
from deepinfer.params import MAX_LOGPROBS
from deepinfer.server.body import read_json, request_schema, validate
from deepinfer.server.completions import Choice
from deepinfer.server.errors import ApiError
from deepinfer.server.logprobs import finite, prompt_logprobs
from deepinfer.server.native import start
from deepinfer.server.protocol import NOT_SAMPLED, CompletionRequest, RequestName, TokenIds
from deepinfer.server.recipe_reader import Events
from deepinfer.server.sizes import check_sizes
from deepinfer.server.state import ServerState, open_ticket, server_state
from deepinfer.server.streams import Answer, EventStream, collect, whole_answer
from deepinfer.server.text_engine import Delta

router = APIRouter()
DEFAULT_MAX_TOKENS = 16  # as in vLLM's SamplingParams
_NOT_SAMPLING = ("model", "prompt", "stream", "stream_options", "echo", "request_id", "rid", "user", "session_id")
_SAMPLING = (set(CompletionRequest.model_fields) - set(_NOT_SAMPLING)) | set(NOT_SAMPLED)


class InferenceRequest(BaseModel):
    """`sampling_params` has the names of Completions' fields."""

    UNSUPPORTED: ClassVar[dict[str, tuple[tuple, str]]] = {
        "features": ((), "only text is read so far"),
        "kv_transfer_params": NOT_SAMPLED["kv_transfer_params"],
    }
    model_config = ConfigDict(strict=True)

    token_ids: TokenIds
    sampling_params: dict[str, Any] | None = None
    model: str | None = None
    stream: bool | None = None
    request_id: RequestName | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None  # as in Completions
    priority: int | None = None


@router.post("/inference/v1/generate", openapi_extra=request_schema(InferenceRequest))
async def generate(request: Request) -> Response:
    """{"request_id", "choices": [{"index", "token_ids", "logprobs", "finish_reason"}]}; no text anywhere."""
    ticket = open_ticket(request, "generate-")
    state = server_state(request)
    body = validate(InferenceRequest, await read_json(request))
    state.check_model(body.model)
    given = body.sampling_params or {}
    check_sizes(state.text, given)
    unknown = sorted(given.keys() - _SAMPLING)
    if unknown:
        message = f"sampling_params: unknown name {unknown[0][:200]!r}; known are {', '.join(sorted(_SAMPLING))}"
        raise ApiError(message, param="sampling_params")
    ticket = ticket.renamed(body.request_id)
    completion = {"max_tokens": DEFAULT_MAX_TOKENS} | given | {"model": state.text.name, "prompt": body.token_ids}
    if body.priority is not None:
        completion["priority"] = body.priority
    try:
        choices, streams = await start(request, validate(CompletionRequest, completion), ticket)
    except ApiError as error:
        if error.param == "prompt":
            error.param, error.message = "token_ids", error.message.replace("prompt", "token_ids", 1)
        elif error.param in given:
            error.param = f"sampling_params.{error.param}"
        raise
    head = {"request_id": ticket.request_id}
    if body.stream:
        return EventStream(request, streams, InferenceAnswer(state, head))
    await collect(request, streams, lambda index, delta: choices[index].add(delta))

    def whole() -> dict[str, Any]:
        answer = head | {"choices": [entry(choice.index, choice) for choice in choices]}
        return answer | _of_prompt(state, choices[0])

    return await whole_answer(request, whole, choices[0].prompt_logprobs is not None)


class InferenceAnswer(Answer):
    """Each event holds the new tokens of one sequence."""

    def __init__(self, state: ServerState, head: dict[str, Any]):
        self.state, self.head = state, head

    def add(self, number: int, delta: Delta[str]) -> Events:
        return [self.head | {"choices": [entry(number, delta)]} | _of_prompt(self.state, delta)]


def _of_prompt(state: ServerState, news: Choice | Delta[str]) -> dict[str, Any]:
    found = news.prompt_logprobs
    return {} if found is None else {"prompt_logprobs": prompt_logprobs(state.text.tokenizer, found, MAX_LOGPROBS)}


def entry(index: int, news: Choice | Delta[str]) -> dict[str, Any]:
    """Log-probabilities as Chat Completions has them, with tokens named by their IDs."""
    logprobs = [_logprob(item) for item in news.logprobs]
    return {
        "index": index,
        "token_ids": news.token_ids,
        "logprobs": {"content": logprobs} if logprobs else None,
        "finish_reason": news.finish_reason,
    }


def _logprob(item: TokenLogprob) -> dict[str, Any]:
    top = [{"token": f"token_id:{token_id}", "logprob": finite(value)} for token_id, value in item.top]
    return {"token": f"token_id:{item.token_id}", "logprob": finite(item.logprob), "top_logprobs": top}
