"""Pictures of a run: training curves, acceptance by draft position, reliability of the confidences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from deepinfer.deepspec.calibration import expected_calibration_error, reliability


def _axes(size: tuple[float, float], count: int = 1) -> tuple[Any, Any]:
    """A figure and its axes, side by side.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'deepinfer[train]'") from None
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(1, count)


def check_picture(path: Path) -> None:
    """That a picture can be written there, before hours are spent on what it shows.

    Raises:
        ValueError: matplotlib is not installed, or has no such format; the folder does not exist.
    """
    figure, _ = _axes((1, 1))
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in formats or not path.parent.is_dir():
        raise ValueError(f"plot: {path}, allowed: a file in a folder that exists, ending in .svg, .png or .pdf")


def plot_training(path: Path, log: list[dict[str, float]]) -> None:
    """Loss and accepted length by step."""
    figure, parts = _axes((8, 3.5), 2)
    for axes, name, label in zip(parts, ("loss", "accepted_length"), ("loss", "accepted length"), strict=True):
        axes.plot([point["step"] for point in log], [point[name] for point in log])
        axes.set(xlabel="step", ylabel=label)
    figure.savefig(path)


def plot_acceptance(path: Path, sets: dict[str, dict[str, Any]]) -> None:
    """Mean accepted length of each task set, with prompt lookup beside it, and the share accepted by position."""
    figure, (lengths, positions) = _axes((9, 3.5), 2)
    at = range(len(sets))
    lengths.bar([i - 0.2 for i in at], [row["mean_length"] for row in sets.values()], 0.4, label="draft")
    lengths.bar([i + 0.2 for i in at], [row["prompt_lookup"] for row in sets.values()], 0.4, label="prompt lookup")
    lengths.set_xticks(list(at), list(sets), rotation=20)
    lengths.set(ylabel="mean accepted length")
    lengths.legend()
    for name, row in sets.items():
        positions.plot(range(1, 1 + len(row["by_position"])), row["by_position"], marker="o", label=name)
    positions.set(xlabel="draft", ylabel="accepted, if all before it are", ylim=(0, 1))
    positions.legend()
    figure.savefig(path)


def plot_reliability(path: Path, curves: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Reliability diagram of each named (probability, happened), with its expected calibration error."""
    figure, axes = _axes((5, 5))
    axes.plot([0, 1], [0, 1], color="grey", linestyle=":", label="perfect")
    for name, (probability, happened) in curves.items():
        rows = reliability(probability, happened)
        label = f"{name}, ECE {expected_calibration_error(probability, happened):.3f}"
        axes.plot([r[1] for r in rows], [r[2] for r in rows], marker="o", label=label)
    axes.set(xlabel="predicted survival", ylabel="share that survived", xlim=(0, 1), ylim=(0, 1))
    axes.legend(loc="upper left")
    figure.savefig(path)
