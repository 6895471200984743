"""Routes that say how the server is: readiness, load, settings (to steer it: control.py)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from deepinfer import __version__
from deepinfer.params import SamplingParams
from deepinfer.server.errors import ApiError
from deepinfer.server.state import ServerState, server_state
from deepinfer.server.text_engine import TextReader

logger = logging.getLogger("deepinfer.server")
router = APIRouter()
GENERATE_SECONDS = 30.0  # how long /health_generate waits for its token


def check_ready(state: ServerState) -> None:
    """ApiError 503 unless a request would run now."""
    state.check_serving()
    if state.gate.is_closed:
        raise ApiError("generation is paused", status=503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while requests are served; 503 while the engine is down, paused, or the server about to stop."""
    check_ready(server_state(request))
    return JSONResponse({"status": "ready"})


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 once the engine has generated one token for this call; 503 if it does not."""
    state = server_state(request)
    check_ready(state)
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
    state = server_state(request)
    stats = state.text.engine.stats()
    waiting = stats.num_waiting + state.gate.num_waiting
    return {
        "server_load": stats.num_running + waiting,
        "num_requests_running": stats.num_running,
        "num_requests_waiting": waiting,
        "kv_cache_usage": 1 - stats.num_free_blocks / stats.num_blocks,
    }


@router.get("/get_load")
async def get_load(request: Request) -> list[dict[str, Any]]:
    """SGLang's /load: one entry an engine, of which there is one.  `num_tokens` is what the used blocks hold."""
    state = server_state(request)
    stats = state.text.engine.stats()
    used = stats.num_blocks - stats.num_free_blocks
    waiting = stats.num_waiting + state.gate.num_waiting
    tokens = used * state.engine_config.get("block_size", 0)
    requests = stats.num_running + waiting
    return [{"dp_rank": 0, "num_reqs": requests, "num_waiting_reqs": waiting, "num_tokens": tokens}]


@router.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    state = server_state(request)
    return {
        "version": __version__,
        "model": state.text.name,
        "model_version": state.text.model_version,
        "max_model_len": state.text.max_model_len,
        "default_thinking": state.default_thinking,
        "sampling_defaults": state.sampling_defaults,
        "engine_config": state.engine_config,
    }


@router.get("/get_server_info")
async def get_server_info(request: Request) -> dict[str, Any]:
    """/server_info with the keys that SGLang's clients and routers read."""
    state = server_state(request)
    stats, window = state.text.engine.stats(), state.text.engine.statistics.window()
    block_size = state.engine_config.get("block_size", 0)
    internal = {
        "last_gen_throughput": window.generation_throughput,
        "num_running_reqs": stats.num_running,
        "num_queue_reqs": stats.num_waiting,
    }
    return await server_info(request) | {
        "model_path": state.text.name,
        "served_model_name": state.text.name,
        "context_length": state.text.max_model_len,
        "max_running_requests": state.engine_config.get("max_num_seqs"),
        "max_total_num_tokens": stats.num_blocks * block_size,
        "status": state.condition,
        "internal_states": [internal],
    }


@router.get("/model_info")
@router.get("/get_model_info")
async def get_model_info(request: Request) -> dict[str, Any]:
    """What SGLang's clients ask before they send a request."""
    state = server_state(request)
    return {
        "model_path": state.text.name,
        "tokenizer_path": state.text.name,
        "is_generation": True,
        "max_model_len": state.text.max_model_len,
        "model_version": state.text.model_version,
        "preferred_sampling_params": state.sampling_defaults or None,
        "weight_version": "default",
    }
