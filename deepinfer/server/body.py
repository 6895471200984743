"""Reading a JSON request body without trusting it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from deepinfer.server.errors import ApiError, from_validation_error
from deepinfer.server.sizes import check_sizes, check_structure
from deepinfer.server.state import server_state

HEAVY_BYTES = 16 * 1024  # a longer body is read, rendered and encoded beside the event loop
BODY_SECONDS = 60.0  # for a body to arrive

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")


async def beside_loop(request: Request, function: Callable[..., Result], *args: Any, heavy: bool = False) -> Result:
    """`function(*args)`, in a worker thread if the request is long or `heavy`, else at once.  After `read_json`."""
    if heavy or request.state.body_bytes > HEAVY_BYTES:
        return await server_state(request).workers.run(function, *args)
    return function(*args)


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled as soon as the client is gone: ClientDisconnect.  After `read_json`."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object, of a size that can be served.

    ApiError 503 until the model is loaded, 408 if it takes longer than BODY_SECONDS, 413 beyond
    `Limits.max_body_bytes`, 400 for anything else.
    """
    state = server_state(request)
    state.check_loaded()
    received = await _receive(request, state.limits.max_body_bytes)
    request.state.body_bytes = len(received)
    state.content_log.asked(request.state.request_id, received)
    body = await beside_loop(request, _parse, received)
    check_sizes(state.text, body)
    return body


async def _receive(request: Request, limit: int) -> bytearray:
    too_large = ApiError(f"the request body is larger than {limit} bytes", status=413)
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    received = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                received += piece
                if len(received) > limit:
                    raise too_large
    except TimeoutError:
        raise ApiError(f"the request body did not arrive within {BODY_SECONDS:g} seconds", status=408) from None
    return received


def _parse(received: bytearray) -> dict[str, Any]:
    check_structure(received)
    try:
        body = json.loads(received.decode("utf-8"), parse_constant=_reject_constant)
        if b"\\ud" in received or b"\\uD" in received:
            json.dumps(body, ensure_ascii=False).encode("utf-8")  # a lone surrogate cannot be encoded or answered
    except RecursionError:
        raise ApiError("the request body is nested too deeply") from None
    except UnicodeError:
        raise ApiError("the request body is not valid UTF-8") from None
    except ValueError as error:
        raise ApiError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(f"the request body must be a JSON object, got {type(body).__name__}")
    return body


def request_schema(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI description of a body that `validate` checks, for the route's `openapi_extra`."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:  # OpenAPI resolves references from its own root, where these are not
        if isinstance(node, dict):
            if "$ref" in node:
                return inline(definitions[node["$ref"].rsplit("/", 1)[1]])
            return {key: inline(value) for key, value in node.items()}
        return [inline(value) for value in node] if isinstance(node, list) else node

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inline(schema)}}}}


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def validate(model: type[Model], body: dict[str, Any]) -> Model:
    """The typed request.  ApiError 400 naming the first field at fault, or a field that is known but not supported."""
    for name, (neutral, reason) in getattr(model, "UNSUPPORTED", {}).items():
        if body.get(name) is not None and body[name] not in neutral:
            raise ApiError(f"{name} is not supported: {reason}", param=name, code="unsupported_parameter")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise from_validation_error(error) from None
