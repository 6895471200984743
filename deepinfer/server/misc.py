"""Models, health, version and metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from deepinfer import __version__
from deepinfer.engine.client import EngineClient
from deepinfer.server.errors import ApiError, error_response, speaks_anthropic
from deepinfer.server.state import ServerState, server_state

router = APIRouter()


def model_card(state: ServerState, anthropic: bool) -> dict[str, Any]:
    """An entry of /v1/models, in OpenAI's shape or Anthropic's."""
    name, created, limit = state.text.name, state.created, state.text.max_model_len or None
    if anthropic:
        created_at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        card = {"type": "model", "id": name, "display_name": name, "created_at": created_at}
        return card | {"max_input_tokens": limit, "max_tokens": limit}
    return {"id": name, "object": "model", "created": created, "owned_by": "deepinfer", "max_model_len": limit}


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """What is served; in Anthropic's shape for clients that send `anthropic-version`."""
    anthropic = speaks_anthropic(request.scope)
    card = model_card(server_state(request), anthropic)
    if anthropic:
        return {"data": [card], "has_more": False, "first_id": card["id"], "last_id": card["id"]}
    return {"object": "list", "data": [card]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    state = server_state(request)
    state.check_model(name)
    return model_card(state, speaks_anthropic(request.scope))


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(request: Request) -> Response:
    """200 while the engine runs or is restarted (/ready tells which); 503 once it has died for good."""
    state = server_state(request)
    if state.text.engine.state == "dead":
        return error_response(request.scope, ApiError("the engine is not running", 503))
    return JSONResponse({"status": "ok"})


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    state = server_state(request)
    stats = state.text.engine.stats()
    if state.text.engine.state == "ready":  # before, the engine does not know
        cache = state.engine_config
        state.metrics.set_cache(cache.get("block_size", 0), stats.num_blocks, cache.get("kv_cache_dtype", "auto"))
    state.metrics.running.set(stats.num_running)
    state.metrics.waiting.set(stats.num_waiting + state.gate.num_waiting)
    state.metrics.cache_usage.set(1 - stats.num_free_blocks / stats.num_blocks)
    state.metrics.used_tokens.set((stats.num_blocks - stats.num_free_blocks) * state.metrics.block_size)
    state.metrics.update(state.text.engine.statistics)
    if isinstance(state.text.engine, EngineClient):
        state.metrics.engine_restarts.set(state.text.engine.num_restarts)
    return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)
