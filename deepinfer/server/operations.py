"""Routes for those who run the server: readiness, load, settings, aborting requests."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from deepinfer import __version__
from deepinfer.params import SamplingParams
from deepinfer.server.body import read_json, request_schema, validate
from deepinfer.server.errors import ApiError
from deepinfer.server.state import owner_of, server_state
from deepinfer.server.text_engine import TextReader

logger = logging.getLogger("deepinfer.server")
router = APIRouter()
GENERATE_SECONDS = 30.0  # how long /health_generate waits for its token


class AbortRequest(BaseModel):
    """POST /abort_requests: names are X-Request-Ids or the ids of answers."""

    model_config = ConfigDict(strict=True)
    request_ids: list[str] | None = None
    abort_all: bool | None = None


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while requests are accepted; 503 while the engine is down, or the server about to stop."""
    server_state(request).check_serving()
    return JSONResponse({"status": "ready"})


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 once the engine has generated one token for this call; 503 if it does not."""
    state = server_state(request)
    state.check_serving()
    params = SamplingParams(max_tokens=1, temperature=0.0)
    stream = state.text.stream([state.text.tokenizer.control_id("bos")], params, TextReader(state.text.tokenizer))
    try:
        async with asyncio.timeout(GENERATE_SECONDS), aclosing(stream):
            async for _ in stream:
                pass
    except Exception as error:  # whatever went wrong, the answer is: not healthy
        logger.warning("health_generate: %s: %s", type(error).__name__, error)
        raise ApiError("no token could be generated", status=503) from None
    return JSONResponse({"status": "ok"})


@router.get("/load")
async def load(request: Request) -> dict[str, Any]:
    """How busy the server is; `server_load` (vLLM's name) is the number of sequences in progress."""
    stats = server_state(request).text.engine.stats()
    return {
        "server_load": stats.num_running + stats.num_waiting,
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage": 1 - stats.num_free_blocks / stats.num_blocks,
    }


@router.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    state = server_state(request)
    return {
        "version": __version__,
        "model": state.text.name,
        "model_version": state.text.model_version,
        "max_model_len": state.text.max_model_len,
        "default_thinking": state.default_thinking,
        "engine_config": state.engine_config,
    }


@router.post("/abort_requests", openapi_extra=request_schema(AbortRequest))
async def abort_requests(request: Request) -> dict[str, Any]:
    """End requests of the same API key; their clients get what was generated, with finish reason "abort"."""
    state, owner = server_state(request), owner_of(request)
    body = validate(AbortRequest, await read_json(request))
    if (body.request_ids is None) == (not body.abort_all):
        raise ApiError("exactly one of request_ids and abort_all must be given", param="request_ids")
    if body.request_ids is None:
        return {"aborted": sorted(state.running.abort(owner)), "unknown": []}
    aborted = {name: state.running.abort(owner, name) for name in body.request_ids}
    return {
        "aborted": [name for name, found in aborted.items() if found],
        "unknown": [name for name, found in aborted.items() if not found],
    }
