"""What `deepinfer deepspec calibrate` fitted for a trained draft, beside its weights in `draft_calibration.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CALIBRATION_NAME = "draft_calibration.json"
LIMITS = 0.001, 1000.0  # of a temperature: far beyond any that is fitted, and what it divides stays a finite float32


@dataclass(frozen=True)
class DraftCalibration:
    """`temperatures` divide the raw confidences, one a draft position; `draft_temperature` divides the draft's logits,
    which changes no most likely token but how near a draft that is drawn comes to the target."""

    temperatures: list[float]
    draft_temperature: float = 1.0

    def write(self, folder: Path) -> Path:
        """The file in `folder`, replaced if there is one."""
        path = folder / CALIBRATION_NAME
        path.write_text(json.dumps(vars(self)) + "\n", encoding="utf-8")
        return path


def read_calibration(folder: Path, block_size: int) -> DraftCalibration:
    """The calibration in `folder`; without that file all temperatures are 1.

    Raises:
        ValueError: the file does not hold `block_size` numbers under "temperatures", or one of them or its
            "draft_temperature" is outside LIMITS.
    """
    path = folder / CALIBRATION_NAME
    if not path.is_file():
        return DraftCalibration([1.0] * block_size)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        values, draft = [float(value) for value in raw["temperatures"]], float(raw.get("draft_temperature", 1.0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"model: {path} is not a calibration: {type(error).__name__}: {error}") from None
    if len(values) != block_size or not all(LIMITS[0] <= value <= LIMITS[1] for value in [*values, draft]):
        raise ValueError(
            f"model: {path} has temperatures {values} and draft_temperature {draft}, "
            f"allowed: {block_size} numbers, and one, of {LIMITS[0]} to {LIMITS[1]}"
        )
    return DraftCalibration(values, draft)
