"""Routes that steer the server: abort, pause, cache reset and profiler, under vLLM's names and SGLang's."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from deepinfer import envs
from deepinfer.server.body import read_json, request_schema, validate
from deepinfer.server.errors import ApiError
from deepinfer.server.state import owner_of, server_state

router = APIRouter()
MAX_NAMES = 1024  # each is looked for among all that runs
PAUSE_MODES = ("abort", "wait", "keep")
POLL_SECONDS = 0.01
PROFILER_SECONDS = 60.0  # for the step in progress to end, and its trace to be written


class AbortRequest(BaseModel):
    """POST /abort_requests: names are X-Request-Ids, the `request_id` of bodies, or the ids of answers."""

    model_config = ConfigDict(strict=True)
    request_ids: list[str] | None = None
    abort_all: bool | None = None


class AbortOneRequest(BaseModel):
    """POST /abort_request: SGLang's, for one name."""

    model_config = ConfigDict(strict=True)
    rid: str | None = None
    abort_all: bool | None = None


@router.post("/abort_requests", openapi_extra=request_schema(AbortRequest))
async def abort_requests(request: Request) -> dict[str, Any]:
    """End requests of the same API key; their clients get what was generated, with finish reason "abort"."""
    body = validate(AbortRequest, await read_json(request))
    if (body.request_ids is None) == (not body.abort_all):
        raise ApiError("exactly one of request_ids and abort_all must be given", param="request_ids")
    return _abort(request, body.request_ids)


@router.post("/abort_request", openapi_extra=request_schema(AbortOneRequest))
async def abort_request(request: Request) -> dict[str, Any]:
    """/abort_requests for one request; an empty `rid` with `abort_all` is none, as SGLang's clients send it."""
    body = validate(AbortOneRequest, await read_json(request))
    if bool(body.rid) == bool(body.abort_all):
        raise ApiError("exactly one of rid and abort_all must be given", param="rid")
    return _abort(request, None if body.abort_all else [body.rid or ""])


def _abort(request: Request, names: list[str] | None) -> dict[str, Any]:
    """Those of these names, or all."""
    state, owner = server_state(request), owner_of(request)
    if names is not None and len(names) > MAX_NAMES:
        raise ApiError(f"request_ids may hold at most {MAX_NAMES} names, got {len(names)}", param="request_ids")
    if names is None:
        return {"aborted": sorted(state.running.abort(owner)), "unknown": []}
    aborted = {name: state.running.abort(owner, name) for name in names}
    return {
        "aborted": [name for name, found in aborted.items() if found],
        "unknown": [name for name, found in aborted.items() if not found],
    }


@router.post("/pause")
@router.post("/pause_generation", include_in_schema=False)
async def pause(request: Request, mode: str = "abort") -> dict[str, Any]:
    """Let nothing generate until /resume: new requests wait.  The answer comes when the engine is at rest.

    Requests in progress are aborted, with `mode=wait` may finish, with `mode=keep` stand still and go on at /resume.
    The mode may also be in a JSON body (SGLang).
    """
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        mode = (await read_json(request)).get("mode", mode)
    if mode not in PAUSE_MODES:
        raise ApiError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {str(mode)[:200]!r}", param="mode")
    state = server_state(request)
    if mode == "keep":
        state.check_serving()
        state.gate.close()
        await state.text.engine.pause(True)
        return {"status": "paused" if state.gate.is_closed else "resumed"}
    state.gate.close()
    if mode == "abort":
        for engine_id in state.running.engine_ids:
            state.text.engine.abort(engine_id)  # which does not know those that wait at the gate
    while len(state.running) > state.gate.num_waiting and state.gate.is_closed:
        await asyncio.sleep(POLL_SECONDS)
    return {"status": "paused" if state.gate.is_closed else "resumed"}


@router.post("/resume")
@router.post("/continue_generation", include_in_schema=False)
async def resume(request: Request) -> dict[str, Any]:
    """End a pause: the requests that wait run, in order of arrival."""
    await server_state(request).end_pause()
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(request: Request) -> dict[str, Any]:
    return {"is_paused": server_state(request).gate.is_closed}


@router.post("/reset_prefix_cache")
@router.post("/flush_cache")
@router.get("/flush_cache", include_in_schema=False)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached prefixes.  400 while requests run, whose cache cannot be dropped.

    An engine at rest keeps no cache of a finished request, so that there is nothing more to do.
    """
    stats = server_state(request).text.engine.stats()
    if stats.num_running or stats.num_waiting:
        message = f"the cache is in use: {stats.num_running} requests run and {stats.num_waiting} wait; /pause first"
        raise ApiError(message, code="cache_in_use")
    return JSONResponse({"success": True, "num_free_blocks": stats.num_free_blocks})


@router.post("/start_profile")
async def start_profile(request: Request, num_steps: str | None = None) -> Response:
    """Record a trace of the engine, until /stop_profile or for `num_steps` steps.  See docs/observability.md."""
    if num_steps is not None and not re.fullmatch(r"[1-9][0-9]{0,8}", num_steps):
        raise ApiError(f"num_steps must be an integer >= 1, got {num_steps[:200]!r}", param="num_steps")
    return await _ask_profiler("/start_profile" + (f"?steps={num_steps}" if num_steps is not None else ""))


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """End the recording; the answer names the trace file, on the server's machine."""
    return await _ask_profiler("/stop_profile")


async def _ask_profiler(path: str) -> Response:
    """The profiler listens where the engine runs; see observability/profiler.py."""
    port = envs.get("DEEPINFER_PROFILER_PORT")
    if not port:
        message = "the profiler is off: start the server with --profiler-port PORT"
        raise ApiError(message, code="unsupported_parameter")
    try:
        async with httpx.AsyncClient(timeout=PROFILER_SECONDS) as http:
            answer = await http.post(f"http://{envs.get('DEEPINFER_PROFILER_HOST')}:{port}{path}")
    except httpx.HTTPError as error:
        raise ApiError(f"the profiler does not answer: {type(error).__name__}", 503) from None
    told = answer.json()
    if answer.status_code != 200:
        raise ApiError(f"the profiler: {told['error']}", answer.status_code if answer.status_code < 500 else 503)
    return JSONResponse(told)
