"""What the benchmarks of matrix products share: the baseline, random operands, records of a figure beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.bench.cuda_timing import time_us
from deepinfer.bench.results import Record, measured

COMMAND = "python -m deepinfer.bench.deep_gemm"
PART = "4B"
E4M3 = torch.float8_e4m3fn


def import_deep_gemm() -> Any:
    """The module, or None where it is not installed."""
    try:
        import deep_gemm

        return deep_gemm
    except ImportError:
        return None


def baseline_us(runs: list[Callable[[], object]]) -> float | None:
    """Median microseconds, or None (and the reason printed) if the baseline does not run here."""
    try:
        return time_us(runs)
    except Exception as error:  # whatever a foreign package raises
        print(f"baseline failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None


def random_fp8(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda").to(E4M3)


def record(name: str, unit: str, value: float, baseline: tuple[str, float | None], target: float | None) -> Record:
    """One record; without a baseline value there is no target."""
    known = baseline[1] is not None
    return measured(
        name,
        part=PART,
        unit=unit,
        value=value,
        command=COMMAND,
        baseline_name=baseline[0] if known else None,
        baseline_value=baseline[1],
        target=target if known else None,
    )


def faster(name: str, us: float, baseline: tuple[str, float]) -> Record:
    """A time beside another's; the smaller the better."""
    return measured(
        name,
        part=PART,
        unit="us",
        value=us,
        higher_is_better=False,
        command=COMMAND,
        baseline_name=baseline[0],
        baseline_value=baseline[1],
    )
