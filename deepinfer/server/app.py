"""The ASGI application: routes, API keys, error shape, request counting."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfer import __version__
from deepinfer.server import chat, completions, misc, tokens
from deepinfer.server.errors import error_body, install_handlers
from deepinfer.server.metrics import Metrics
from deepinfer.server.state import ServerState

OPEN_PATHS = ("/health", "/ping", "/metrics")  # answered without an API key


def create_app(state: ServerState) -> FastAPI:
    """The application of one model.  The engine in `state` is closed with the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(state.text.engine.close)

    app = FastAPI(title="deepinfer", version=__version__, lifespan=lifespan, redirect_slashes=False)
    app.state.server = state
    install_handlers(app)
    for module in (chat, completions, tokens, misc):
        app.include_router(module.router)
    app.add_middleware(CountRequests, metrics=state.metrics)
    app.add_middleware(RequireKey, keys=state.api_keys)
    return app


class RequireKey:
    """401 without `Authorization: Bearer KEY`, on every path but OPEN_PATHS; no keys means no check."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self.keys or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self.app(scope, receive, send)
            return
        body = error_body("missing or wrong API key; send `Authorization: Bearer KEY`", 401, code="invalid_api_key")
        await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        # Every key is compared, each in constant time, so that the answer's timing tells nothing.
        matches = [hmac.compare_digest(key.strip(), known) for known in self.keys]
        return kind.lower() == b"bearer" and any(matches)


class CountRequests:
    """http_requests_total by route template (never by raw path: clients could make up endless ones)."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status: dict[str, Any] = {"code": 500}

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                status["code"] = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            handler = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in ("GET", "POST") else "other"
            self.metrics.http_requests.labels(handler, method, str(status["code"])).inc()
