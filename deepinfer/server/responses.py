"""POST /v1/responses (OpenAI's Responses API), and getting, cancelling and deleting what it stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from deepinfer.params import SamplingParams
from deepinfer.recipe import ResponsesStream, convert_responses_request
from deepinfer.server.body import beside_loop, read_json, request_schema, validate
from deepinfer.server.errors import ApiError, from_value_error
from deepinfer.server.item_protocols import ResponsesRequest
from deepinfer.server.prompts import PreparedPrompt, prepare, with_thinking_budget
from deepinfer.server.recipe_reader import Events, RecipeReader
from deepinfer.server.response_store import StoredResponse
from deepinfer.server.sequences import RunningSequence
from deepinfer.server.state import (
    ServerState,
    check_prompt,
    check_room,
    open_ticket,
    owner_of,
    server_state,
    start_sequences,
)
from deepinfer.server.streams import Answer, EventStream, as_api_error, collect
from deepinfer.server.structure import asked_structure, conversation_structure, holds_answer, with_structure
from deepinfer.server.text_engine import Delta

router = APIRouter()
CANCEL_SECONDS = 10.0  # how long a cancelled response may take to end


async def prepare_response(
    request: Request, raw: dict[str, Any], body: ResponsesRequest
) -> tuple[list[dict[str, Any]], PreparedPrompt]:
    """(input items, those of earlier responses included; prompt).  ApiError 400 naming the field at fault."""
    state = server_state(request)
    body.check_promises()
    items = body.input or []
    if isinstance(items, str):
        items = [{"type": "message", "role": "user", "content": items}]
    if body.previous_response_id is not None:
        items = [*_previous(state, owner_of(request), body.previous_response_id).context(), *items]
    elif body.input is None and body.instructions is None:
        raise ApiError("input or instructions must be given", param="input")
    given = items if body.input is not None or body.previous_response_id is not None else None
    continued = body.previous_response_id is not None  # by a short request, of a conversation of any length
    raw = raw | {"input": given}
    prepared = await beside_loop(request, prepare, state, raw, convert_responses_request, "input", heavy=continued)
    return items, prepared


def _previous(state: ServerState, owner: str, response_id: str) -> StoredResponse:
    entry = state.responses.get(owner, response_id)
    if entry is None:
        message = f"previous_response_id: no response {response_id[:200]!r} is stored"
        raise ApiError(message, param="previous_response_id", code="previous_response_not_found")
    if not entry.ended.is_set():
        raise ApiError("previous_response_id: that response is still in progress", param="previous_response_id")
    return entry


@router.post("/v1/responses", openapi_extra=request_schema(ResponsesRequest))
async def create_response(request: Request) -> Response:
    ticket = open_ticket(request, "resp_")
    state = server_state(request)
    raw = await read_json(request)
    body = validate(ResponsesRequest, raw)
    state.check_model(body.model)
    try:
        check_room(state, body.limit, "max_output_tokens")
        params = body.sampling_params(body.limit, body.logprob_count, state)
        stop = body.stop_strings
    except ValueError as error:
        raise from_value_error(error) from None
    items, prepared = await prepare_response(request, raw, body)
    check_prompt(state, prepared.token_ids, params.max_tokens, "input", "max_output_tokens")
    asked = asked_structure(body, raw, "text.format")
    conversation = prepared.with_output(stop, body.include_stop_str_in_output, holds_answer(asked))
    parallel = body.parallel_tool_calls is not False
    params = with_thinking_budget(state, params, body.thinking_token_budget, conversation)
    ends_thinking = params.thinking_token_budget is not None
    structure = await beside_loop(
        request, conversation_structure, state, prepared.conversation, asked, "text.format", parallel, ends_thinking
    )
    params = await with_structure(request, params, structure)
    stream = ResponsesStream(
        replace(conversation, echo={**conversation.echo, **settings(body, params)}),
        ticket.answer_id,
        state.text.name,
        int(time.time()),
        state.text.tokenizer,
    )
    reader = RecipeReader(stream)
    sequences = start_sequences(state, [prepared.token_ids], params, 1, lambda: reader, ticket, "input")
    kept = None if body.store is False else state.responses.put(ticket.owner, stream.response(), items)

    def keep(response: dict[str, Any]) -> None:
        if kept is not None:
            state.responses.finish(kept, response)

    answer = ResponseAnswer(reader, len(prepared.token_ids), keep)
    if body.background:
        task = asyncio.create_task(run_in_background(sequences, answer))
        state.background.add(task)
        task.add_done_callback(state.background.discard)
        return JSONResponse(stream.response())
    if body.stream:
        return EventStream(request, sequences, answer, named=True, interval=body.stream_interval)
    await run(request, sequences, answer)
    return JSONResponse(stream.response())


def settings(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """What the response repeats of the request, beside what recipe does."""
    return {
        "background": bool(body.background),
        "frequency_penalty": body.frequency_penalty or 0.0,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": body.presence_penalty or 0.0,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }


class ResponseAnswer(Answer):
    """The events of a response.  However it ends, `keep` gets it as it ended."""

    def __init__(
        self, reader: RecipeReader[ResponsesStream], prompt_tokens: int, keep: Callable[[dict[str, Any]], None]
    ):
        self.reader, self.prompt_tokens, self.keep = reader, prompt_tokens, keep

    def begin(self) -> Events:
        return self.reader.stream.start(self.prompt_tokens)

    def add(self, number: int, delta: Delta[Events]) -> Events:
        return self.reader.add(delta)

    def fail(self, error: ApiError) -> Events:
        return self.reader.stream.fail(error.message)

    def close(self) -> None:
        self.reader.stream.finish("abort")  # says nothing new if the response has ended by itself
        self.keep(self.reader.stream.response())


async def run(request: Request | None, sequences: Sequence[RunningSequence[Any]], answer: ResponseAnswer) -> None:
    """A response that is not streamed, to its end.  Raises what went wrong, ClientDisconnect included."""
    try:
        answer.begin()
        await collect(request, sequences, answer.add)
    except ClientDisconnect:
        raise
    except Exception as error:
        failure = as_api_error(error)
        answer.fail(failure)
        raise failure from None
    finally:
        answer.close()


async def run_in_background(sequences: Sequence[RunningSequence[Any]], answer: ResponseAnswer) -> None:
    try:
        await run(None, sequences, answer)
    except ApiError:
        pass  # the stored response says it


def stored(request: Request, response_id: str) -> StoredResponse:
    """ApiError 404 unless the response is there, and belongs to the same API key."""
    entry = server_state(request).responses.get(owner_of(request), response_id)
    if entry is None:
        raise ApiError(f"no response {response_id[:200]!r} is stored", status=404, param="response_id")
    return entry


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> dict[str, Any]:
    if request.query_params.get("stream") == "true":
        raise ApiError("stream is not supported here: events are not stored", param="stream")
    return stored(request, response_id).response


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> dict[str, Any]:
    """The items that the model was given, the latest first; always all of them."""
    entry = stored(request, response_id)
    items = [{"id": f"item_{number}", **item} for number, item in enumerate(entry.items)][::-1]
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": items, "has_more": False, **ends}


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    """Forget a response; one in progress is cancelled."""
    stored(request, response_id)
    state, owner = server_state(request), owner_of(request)
    state.running.abort(owner, response_id)
    state.responses.delete(owner, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> dict[str, Any]:
    """End a response in progress; the answer is how it ended.  One that has ended stays as it is."""
    entry = stored(request, response_id)
    server_state(request).running.abort(owner_of(request), response_id)
    try:
        await asyncio.wait_for(entry.ended.wait(), CANCEL_SECONDS)
    except TimeoutError:
        raise ApiError("the response has not ended yet", status=503) from None
    return entry.response
