"""Errors in the shape that the client's protocol expects, without a traceback.

OpenAI: `{"error": {"message", "type", "param", "code"}}`.
Anthropic: `{"type": "error", "error": {"type", "message"}}`, whose message names the field.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from deepinfer.errors import BusyError, EngineStoppedError, encodable
from deepinfer.recipe import ConversionError, RequestError

logger = logging.getLogger("deepinfer.server")

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _TYPES | {403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}
_MAX_MESSAGE = 4000  # characters
_MAX_ECHO = 200  # characters of a client's own text repeated in a message
RETRY_AFTER = 5  # seconds, with a 503
BUSY_SECONDS = 10  # to wait before asking for a grammar again


class ApiError(Exception):
    """An answer to a bad request.  `param` names the field at fault, `retry_after` is in seconds."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        if len(message) > _MAX_MESSAGE:  # one that repeats a client's text
            message = message[:_MAX_MESSAGE] + "..."
        message = encodable(message)  # a schema in a text may hold what no answer can
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param and encodable(param), code
        self.retry_after = RETRY_AFTER if retry_after is None and status == 503 else retry_after

    def body(self) -> dict:
        return error_body(self.message, self.status, self.param, self.code)

    def anthropic_body(self) -> dict:
        return anthropic_error_body(self.message, self.status, self.param)


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict:
    """An error in OpenAI's shape; its type follows from the status."""
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error_body(message: str, status: int, param: str | None = None) -> dict:
    """An error in Anthropic's shape, whose message names the field."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if param and param not in message:
        message = f"{param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def speaks_anthropic(scope: Scope) -> bool:
    """Whether the client expects Anthropic's shapes: by the path, or by the header of its clients."""
    return scope["path"].startswith("/v1/messages") or any(name == b"anthropic-version" for name, _ in scope["headers"])


def error_response(scope: Scope, error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    """The error as an answer to this request."""
    known = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.retry_after is not None:
        known["Retry-After"] = str(error.retry_after)
    body = error.anthropic_body() if speaks_anthropic(scope) else error.body()
    return JSONResponse(body, error.status, known | (headers or {}))


def from_value_error(error: ValueError, param: str | None = None) -> ApiError:
    """A ValueError of the engine or of recipe as a 400, a BusyError as a 429.

    Recipe's carry `param`; the engine's messages start with the field's name.
    """
    if isinstance(error, RequestError):
        path = error.path if isinstance(error, ConversionError) else ""
        return ApiError(str(error), error.status_code, path or error.param or param)
    field = str(error).split(" ")[0].rstrip(":").partition(".")[0]  # of `field.member`, too
    param = param or (field if field.isidentifier() else None)
    if isinstance(error, BusyError):
        return ApiError(str(error), 429, param, retry_after=BUSY_SECONDS)
    return ApiError(str(error), param=param)


def from_validation_error(error: ValidationError) -> ApiError:
    """The first fault that pydantic found, with its path as `messages[0].content`."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else ("." if path else "") + str(part)
    message = f"{path}: {first['msg']}" if path else first["msg"]
    given: Any = first.get("input")
    if isinstance(given, bool | int | float | str):
        message += f", got {repr(given)[:_MAX_ECHO]}"
    return ApiError(message, param=path or None)


def install_handlers(app: FastAPI) -> None:
    """Answer every failure, the framework's own 404 and 405 included, in the protocol's shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_response(request.scope, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            message = f"no such path: {request.method} {request.url.path}"
        elif error.status_code == 405:
            message = f"{request.method} is not allowed on {request.url.path}"
        else:
            message = str(error.detail)
        headers = dict(error.headers) if error.headers else None
        return error_response(request.scope, ApiError(message, error.status_code), headers)

    @app.exception_handler(EngineStoppedError)
    async def engine_stopped(request: Request, error: EngineStoppedError) -> Response:
        return error_response(request.scope, ApiError("the engine is not running", 503))

    @app.exception_handler(ClientDisconnect)
    async def client_gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it; it counts in http_requests_total

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("unexpected error in %s %s", request.method, request.url.path, exc_info=error)
        return error_response(request.scope, ApiError("internal server error", 500))
