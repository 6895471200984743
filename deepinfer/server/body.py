"""Reading a JSON request body without trusting it."""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from deepinfer.server.errors import ApiError, from_validation_error

MAX_BODY_BYTES = 32 * 1024 * 1024

Model = TypeVar("Model", bound=BaseModel)


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object.  ApiError 400 for anything else, 413 beyond MAX_BODY_BYTES."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
        raise ApiError(f"the request body is larger than {MAX_BODY_BYTES} bytes", status=413)
    received = bytearray()
    async for piece in request.stream():
        received += piece
        if len(received) > MAX_BODY_BYTES:
            raise ApiError(f"the request body is larger than {MAX_BODY_BYTES} bytes", status=413)
    try:
        body = json.loads(received.decode("utf-8"), parse_constant=_reject_constant)
        json.dumps(body, ensure_ascii=False).encode("utf-8")  # a lone surrogate escape cannot be encoded or answered
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
