"""The record of how many tokens each expert got, under SGLang's names: what an expert balancer is fed with."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from deepinfer.engine.messages import ExpertCommand, ExpertReport
from deepinfer.server.errors import ApiError
from deepinfer.server.state import server_state

router = APIRouter()


async def _ask(request: Request, command: ExpertCommand) -> ExpertReport:
    state = server_state(request)
    state.check_serving()
    return await state.text.engine.record_experts(command)


@router.post("/start_expert_distribution_record")
async def start_record(request: Request) -> dict[str, Any]:
    """Begin anew.  The engine counts a step about four times a second, not every one."""
    return {"is_recording": (await _ask(request, "start")).is_recording}


@router.post("/stop_expert_distribution_record")
async def stop_record(request: Request) -> dict[str, Any]:
    """Count no further steps; what was counted is kept for the dump."""
    return {"is_recording": (await _ask(request, "stop")).is_recording}


@router.post("/dump_expert_distribution_record")
async def dump_record(request: Request) -> dict[str, Any]:
    """`logical_count` [layers][experts]: tokens of each expert in `num_steps` counted steps.  400 if there are none."""
    report = await _ask(request, "dump")
    if report.counts is None:
        message = "no step was counted: POST /start_expert_distribution_record, then generate"
        raise ApiError(message, code="nothing_recorded")
    return {"is_recording": report.is_recording, "num_steps": report.num_steps, "logical_count": report.counts}
