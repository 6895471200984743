"""Recorded machines (machines.json): what decode steps and drafts of nano took there."""

from __future__ import annotations

import json
from pathlib import Path

MACHINES: dict[str, dict] = json.loads(Path(__file__).with_name("machines.json").read_text())


def points(name: str, field: str) -> tuple[tuple[int, float], ...]:
    """`step_ms` by rows, or `draft_ms` by sequences."""
    return tuple((count, ms) for count, ms in MACHINES[name][field])
