"""The decode performance curve: how long a decode step takes at which batch size, for whoever plans batches.

Speculative decoding asks it whether verifying more tokens is worth the longer step. Measured once for a model, a card
and the versions of the software, then kept on disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import deepinfer
from deepinfer import envs
from deepinfer.config.engine import INT32_MAX, MAX_STEP_MS, EngineConfig
from deepinfer.errors import shown
from deepinfer.files import replacing
from deepinfer.kernels.cpu.build import BuildError, cache_dir, cpu_features

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeCurve:
    """`points` (batch size, milliseconds), ascending by batch size; at least one."""

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes[0] < 1 or sizes[-1] > INT32_MAX or sizes != sorted(set(sizes)):
            raise ValueError(f"points must have ascending batch sizes from 1 to {INT32_MAX}, got {shown(sizes)}")
        if not all(0 < milliseconds <= MAX_STEP_MS for _, milliseconds in self.points):
            raise ValueError(f"points must have times above 0, at most {MAX_STEP_MS:g}")

    def step_ms(self, batch: int) -> float:
        """Milliseconds of a step of `batch` sequences: linear between the points.

        Below the first point its time; beyond the last one the slope of the last two goes on, if it rises.
        """
        sizes = [size for size, _ in self.points]
        right = bisect_left(sizes, batch)
        if right == 0:
            return self.points[0][1]
        beyond = right == len(sizes)
        right = min(right, len(sizes) - 1)
        (x0, y0), (x1, y1) = self.points[max(right - 1, 0)], self.points[right]
        if x0 == x1 or (beyond and y1 <= y0):
            return y1
        return y0 + (y1 - y0) * (batch - x0) / (x1 - x0)


def curve_key(model_config: object, config: EngineConfig) -> dict[str, Any]:
    """The model, the device, the versions and the settings that the times depend on."""
    device = torch.device(config.device)
    on_gpu = device.type == "cuda"
    settings = (
        "block_size", "max_num_seqs", "cudagraph_batch_size_interval", "kv_cache_dtype", "quantize_activations",
        "torch_compile",
    )  # fmt: skip
    return {
        "model": hashlib.sha256(repr(model_config).encode()).hexdigest(),
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_features(),
        "threads": None if on_gpu else torch.get_num_threads(),
        "kernels": envs.get("DEEPINFER_KERNELS"),
        "deepinfer": deepinfer.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version("triton") if find_spec("triton") else None,
        **{name: getattr(config, name) for name in settings},
    }


def load_or_measure(key: dict[str, Any], measure: Callable[[], dict[int, float]]) -> DecodeCurve:
    """The curve kept for `key`, or a new one from `measure` (milliseconds by batch size), which is then kept.

    key: everything that changes the times, as JSON. A file that is damaged or belongs to another key is replaced; where
    nothing can be kept, every start measures.
    """
    try:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
        path = cache_dir() / f"decode-curve-{digest}.json"
    except BuildError as error:
        logger.warning("the decode curve is not kept: %s", error)
        return DecodeCurve(tuple(sorted(measure().items())))
    curve = _read(path, key)
    if curve is None:
        curve = DecodeCurve(tuple(sorted(measure().items())))
        _write(path, key, curve)
    return curve


def _read(path: Path, key: dict[str, Any]) -> DecodeCurve | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != json.loads(json.dumps(key)):
            return None
        return DecodeCurve(tuple((int(size), float(milliseconds)) for size, milliseconds in stored["points"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):  # none yet, cut off, or not ours
        return None


def _write(path: Path, key: dict[str, Any], curve: DecodeCurve) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(json.dumps({"key": key, "points": curve.points}))
    except OSError as error:
        logger.warning("the decode curve is not kept: %s", error.strerror or error)
