"""A trained V4.1 draft head on disk: the public mtp.* tensors in one file, and a checkpoint that it is attached to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.deepspec.files import save_whole
from deepinfer.deepspec.targets import HEAD_NAME
from deepinfer.deepspec.v41_blocks import draft_kinds
from deepinfer.models.checkpoint_format import expected_tensors, parameter_specs, stored_tensors
from deepinfer.models.draft_calibration import CALIBRATION_NAME
from deepinfer.models.loader import INDEX_NAME, is_draft
from deepinfer.models.reference import Weights
from deepinfer.models.writer import quantize
from deepinfer.train.parameters import ROUNDING


def head_weights(config: ModelConfig, masters: dict[str, Tensor]) -> Weights:
    """Float32 mtp.* tensors on the CPU, as a reader of the stored head sees them."""
    weights: Weights = {}
    for kind in draft_kinds(config):
        rounded = ROUNDING[kind.storage](masters[kind.name].detach()).float().cpu()
        weights.update(zip(kind.names, rounded.unbind(0), strict=True))
    biases = {f"{name}_vl": value.clone() for name, value in weights.items() if name.endswith("gate.bias")}
    return {**weights, **biases}


def write_head(path: Path, config: ModelConfig, weights: Weights) -> None:
    """Quantise the mtp.* tensors of `weights` and write them to one safetensors file, replaced as a whole."""
    stored: dict[str, Tensor] = {}
    for spec in parameter_specs(config).values():
        if not is_draft(spec.name):
            continue
        tensors = list(stored_tensors(spec))
        per_unit = 1 if spec.storage in ("bf16", "f32") else 2
        for start in range(0, len(tensors), per_unit):
            unit = tensors[start : start + per_unit]
            whole = weights[spec.name]
            values, scale = quantize(spec.storage, whole if unit[0].expert is None else whole[unit[0].expert])
            parts = [values] if scale is None else [values, scale.view(torch.float8_e8m0fnu)]
            stored.update({t.name: part.cpu().contiguous() for t, part in zip(unit, parts, strict=True)})
    path.parent.mkdir(parents=True, exist_ok=True)
    save_whole(path, stored, {"format": "pt"})


def attach_head(checkpoint: Path, head: Path, out: Path) -> ModelConfig:
    """`checkpoint` with the head file `head` as its draft layers, written to `out` (which may be `checkpoint`).

    The other tensors keep their files, byte for byte; a head that was attached before is replaced.

    Raises:
        ValueError: the checkpoint has a head in its other files, or the file is not a head of its shape.
    """
    found = _shapes(head)
    stages = {name.split(".")[1] for name in found if is_draft(name)}
    config = ModelConfig.from_file(checkpoint).with_draft_layers(max(len(stages), 1))
    expected = {name: spec.shape for name, spec in expected_tensors(config).items() if is_draft(name)}
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise ValueError(f"head: {head} does not fit {checkpoint}: {wrong[0]} and {len(wrong) - 1} more")
    index = json.loads((checkpoint / INDEX_NAME).read_text(encoding="utf-8"))
    weight_map = {name: file for name, file in index["weight_map"].items() if not is_draft(name)}
    old = {file for name, file in index["weight_map"].items() if is_draft(name)}
    if old - {HEAD_NAME}:
        raise ValueError(f"checkpoint: {checkpoint} has a draft head in {', '.join(sorted(old))}, which stays")
    total = index["metadata"]["total_size"] - (_size(checkpoint / HEAD_NAME) if old else 0)
    out.mkdir(parents=True, exist_ok=True)
    if out.resolve() != checkpoint.resolve():
        for file in {*weight_map.values(), "tokenizer.json"}:
            shutil.copyfile(checkpoint / file, out / file)
    if head.resolve() != (out / HEAD_NAME).resolve():
        shutil.copyfile(head, out / HEAD_NAME)
    weight_map |= dict.fromkeys(found, HEAD_NAME)
    index = {
        "metadata": {**index["metadata"], "total_size": total + _size(out / HEAD_NAME)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (out / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
    (out / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    (out / CALIBRATION_NAME).unlink(missing_ok=True)  # that of another head
    return config


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"head: {path} cannot be read: {error}") from None


def _size(path: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(path).values())
