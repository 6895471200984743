"""The ASGI application: routes and what surrounds them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from deepinfer import __version__
from deepinfer.engine.client import EngineClient
from deepinfer.server import (
    api_docs,
    chat,
    completions,
    control,
    experts,
    inference,
    messages,
    misc,
    native,
    operations,
    parsers,
    responses,
    tokens,
)
from deepinfer.server.errors import install_handlers
from deepinfer.server.middleware import OPEN_PATHS, CountRequests, GiveRequestId, LogRequests, RequireKey, StripRootPath
from deepinfer.server.state import ServerState
from deepinfer.server.web import routes as web_page

ROUTERS = (
    chat,
    completions,
    responses,
    messages,
    native,
    inference,
    tokens,
    parsers,
    misc,
    operations,
    control,
    experts,
    api_docs,
)


def create_app(
    state: ServerState, allowed_origins: tuple[str, ...] = (), web: bool = True, root_path: str = "", docs: bool = True
) -> FastAPI:
    """The application of one model.  The engine in `state` is closed with the application.

    Pages of `allowed_origins` may call it from a browser (CORS); without any, none may but its own (`web`).  Behind a
    proxy that puts `root_path` before every path, it answers with and without it.  Without `docs` nothing describes it.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if isinstance(state.text.engine, EngineClient):
            state.text.engine.attach()
        yield
        await asyncio.to_thread(state.text.engine.close)

    # /docs is a page of our own (api_docs.py): FastAPI's loads its code from a public server.
    app = FastAPI(
        title="deepinfer",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        servers=[{"url": root_path}] if root_path else None,
    )
    app.state.server = state
    install_handlers(app)
    for module in ROUTERS:
        if docs or module is not api_docs:
            app.include_router(module.router)
    if web:
        app.include_router(web_page.router)
    app.add_middleware(CountRequests, metrics=state.metrics)
    app.add_middleware(RequireKey, keys=state.api_keys, open_paths=OPEN_PATHS + (web_page.PATHS if web else ()))
    if allowed_origins:  # outside the key check: a browser's preflight request carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(LogRequests, quiet_paths=state.quiet_paths)
    app.add_middleware(GiveRequestId)
    if root_path:
        app.add_middleware(StripRootPath, root_path=root_path)
    return app
