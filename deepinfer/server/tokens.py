"""POST /tokenize, /detokenize and the render routes: what the model would see, without running it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from deepinfer.server.body import beside_loop, read_json, request_schema, validate
from deepinfer.server.chat import prepare_chat
from deepinfer.server.completions import encode_prompts
from deepinfer.server.errors import ApiError, from_value_error
from deepinfer.server.item_protocols import MessagesRequest, ResponsesRequest
from deepinfer.server.logprobs import token_text
from deepinfer.server.messages import prepare_message
from deepinfer.server.prompts import PreparedPrompt
from deepinfer.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from deepinfer.server.responses import prepare_response
from deepinfer.server.state import ServerState, server_state

router = APIRouter()


@router.post("/v1/tokenize", include_in_schema=False)  # SGLang has both
@router.post("/tokenize", openapi_extra=request_schema(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    state = server_state(request)
    raw = await read_json(request)
    body = validate(TokenizeRequest, raw)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("exactly one of prompt and messages must be given", param="prompt")
    return await beside_loop(request, tokenized, state, body, raw)


def tokenized(state: ServerState, body: TokenizeRequest, raw: dict[str, Any]) -> Response:
    """The answer of /tokenize. ApiError 400 naming the field for what is refused."""
    if body.prompt is not None:
        token_ids = state.text.encode(body.prompt, body.add_special_tokens)
    else:
        token_ids = prepare_chat(state, raw).token_ids
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": state.text.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [token_text(state.text.tokenizer, token_id) for token_id in token_ids]
    return JSONResponse(answer)


@router.post("/v1/detokenize", include_in_schema=False)
@router.post("/detokenize", openapi_extra=request_schema(DetokenizeRequest))
async def detokenize(request: Request) -> dict[str, Any]:
    state = server_state(request)
    body = validate(DetokenizeRequest, await read_json(request))
    state.check_model(body.model)
    try:
        return {"prompt": await beside_loop(request, state.text.tokenizer.decode, body.tokens)}
    except ValueError as error:
        raise from_value_error(error, "tokens") from None


@router.post("/v1/chat/completions/render", openapi_extra=request_schema(ChatRequest))
async def render_chat(request: Request) -> Response:
    """The prompt of a chat request: its text, its token IDs and which ranges of the text are control tokens."""
    state = server_state(request)
    raw = await read_json(request)
    body = validate(ChatRequest, raw)
    state.check_model(body.model)
    return rendered(state, await beside_loop(request, prepare_chat, state, raw, body.continues))


@router.post("/v1/completions/render", openapi_extra=request_schema(CompletionRequest))
async def render_completion(request: Request) -> Response:
    """The prompts of a completion request: token IDs, and their text with control tokens by their spelling."""
    state = server_state(request)
    body = validate(CompletionRequest, await read_json(request))
    state.check_model(body.model)
    return await beside_loop(request, rendered_prompts, state, body)


def rendered_prompts(state: ServerState, body: CompletionRequest) -> Response:
    """Each prompt of a completion as token IDs, and as the text that they stand for."""
    prompts = encode_prompts(state, body)
    try:
        texts = [state.text.tokenizer.decode(token_ids) for token_ids in prompts]
    except ValueError as error:
        raise from_value_error(error, "prompt") from None
    rendered = [{"prompt": text, "token_ids": token_ids} for text, token_ids in zip(texts, prompts, strict=True)]
    return JSONResponse({"model": state.text.name, "prompts": rendered})


@router.post("/v1/responses/render", openapi_extra=request_schema(ResponsesRequest))
async def render_response(request: Request) -> Response:
    """The prompt of a Responses request, as `/v1/chat/completions/render` shows it."""
    state = server_state(request)
    raw = await read_json(request)
    body = validate(ResponsesRequest, raw)
    state.check_model(body.model)
    _, prepared = await prepare_response(request, raw, body)
    return rendered(state, prepared)


@router.post("/v1/messages/render", openapi_extra=request_schema(MessagesRequest))
async def render_message(request: Request) -> Response:
    """The prompt of a Messages request, as `/v1/chat/completions/render` shows it."""
    state = server_state(request)
    raw = await read_json(request)
    body = validate(MessagesRequest, raw)
    state.check_model(body.model)
    return rendered(state, await beside_loop(request, prepare_message, state, raw, body))


def rendered(state: ServerState, prepared: PreparedPrompt) -> Response:
    """The prompt of a conversation: its text, its token IDs and which ranges of the text are control tokens."""
    return JSONResponse(
        {
            "model": state.text.name,
            "prompt": prepared.prompt.text,
            "token_ids": prepared.token_ids,
            "control_ranges": prepared.prompt.control_ranges,
        }
    )
