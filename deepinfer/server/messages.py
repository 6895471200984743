"""POST /v1/messages and /v1/messages/count_tokens (Anthropic's Messages API)."""

from __future__ import annotations

import secrets
import string
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from deepinfer.recipe import MessagesStream, convert_messages_request
from deepinfer.server.body import beside_loop, read_json, request_schema, validate
from deepinfer.server.errors import ApiError, from_value_error
from deepinfer.server.item_protocols import MessagesRequest
from deepinfer.server.prompts import PreparedPrompt, prepare, with_thinking_budget
from deepinfer.server.recipe_reader import Events, RecipeReader
from deepinfer.server.state import ServerState, check_prompt, open_ticket, server_state, start_sequences
from deepinfer.server.streams import Answer, EventStream, collect
from deepinfer.server.structure import asked_structure, conversation_structure, holds_answer, with_structure
from deepinfer.server.text_engine import Delta

router = APIRouter()
_LETTERS = string.ascii_letters + string.digits


def prepare_message(state: ServerState, raw: dict[str, Any], body: MessagesRequest) -> PreparedPrompt:
    """ApiError 400 naming the field for whatever is refused."""
    body.check_promises()
    return prepare(state, raw, convert_messages_request, "messages")


@router.post("/v1/messages", openapi_extra=request_schema(MessagesRequest))
async def create_message(request: Request) -> Response:
    ticket = open_ticket(request, "msg_")
    state = server_state(request)
    raw = await read_json(request)
    body = validate(MessagesRequest, raw)
    state.check_model(body.model)
    prepared = await beside_loop(request, prepare_message, state, raw, body)
    check_prompt(state, prepared.token_ids, None, "messages")
    # Clients of this protocol must send a limit, and send the same one to every model: it means "at most".
    room = state.text.max_model_len - len(prepared.token_ids)
    try:
        limit = None if body.max_tokens is None else min(body.max_tokens, room)
        params = body.sampling_params(limit, None, state)
    except ValueError as error:
        raise from_value_error(error) from None
    asked = asked_structure(body, raw, body.format_field)
    conversation = prepared.with_output(body.stop_sequences or [], body.include_stop_str_in_output, holds_answer(asked))
    parallel = not (body.tool_choice or {}).get("disable_parallel_tool_use")
    params = with_thinking_budget(state, params, body.thinking_budget, conversation)
    ends_thinking = params.thinking_token_budget is not None
    structure = await beside_loop(
        request, conversation_structure, state, prepared.conversation, asked, body.format_field, parallel, ends_thinking
    )
    params = await with_structure(request, params, structure)
    stream = MessagesStream(
        conversation, ticket.answer_id, state.text.name, tokenizer=state.text.tokenizer, new_id=new_call_id
    )
    reader = MessageReader(stream)
    streams = start_sequences(state, [prepared.token_ids], params, 1, lambda: reader, ticket, "messages")
    started = stream.start(len(prepared.token_ids))
    if body.stream:
        return EventStream(request, streams, MessageAnswer(reader, started), named=True, interval=body.stream_interval)
    await collect(request, streams, lambda _, delta: reader.add(delta))
    return JSONResponse(stream.response())


@router.post("/v1/messages/count_tokens", openapi_extra=request_schema(MessagesRequest))
async def count_tokens(request: Request) -> dict[str, int]:
    """How many tokens the prompt of this request has, without running it."""
    state = server_state(request)
    raw = await read_json(request)
    body = validate(MessagesRequest, raw)
    state.check_model(body.model)
    prepared = await beside_loop(request, prepare_message, state, raw, body)
    return {"input_tokens": len(prepared.token_ids)}


class MessageReader(RecipeReader[MessagesStream]):
    """The protocol has no stop reason for an abort from outside: it is an error."""

    def finish(self, reason: str) -> Events:
        if reason == "abort":
            raise ApiError("the request was aborted", status=400, code="aborted")
        return super().finish(reason)


class MessageAnswer(Answer):
    """The events of a message; `started` are the first."""

    def __init__(self, reader: MessageReader, started: Events):
        self.reader, self.started = reader, started

    def begin(self) -> Events:
        return self.started

    def add(self, number: int, delta: Delta[Events]) -> Events:
        return self.reader.add(delta)

    def fail(self, error: ApiError) -> Events:
        return [error.anthropic_body()]


def new_call_id(index: int, empty_reasoning: bool) -> str:
    """`toolu_` and 24 random characters; `ET_` marks calls of a turn whose reasoning was empty (recipe spec, 2)."""
    return f"toolu_{'ET_' if empty_reasoning else ''}" + "".join(secrets.choice(_LETTERS) for _ in range(24))
