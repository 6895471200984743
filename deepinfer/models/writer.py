"""Writes the public checkpoint format: quantised weights, shards, index, config.json (spec: model, section 2).

The same weights always give the same bytes. Shards are split between tensors, expert by expert, never between a weight
and its scale.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.kernels.reference.quant import pack_fp8_row, quantize_fp4_weight, quantize_fp8_weight
from deepinfer.models.checkpoint_format import (
    ParameterSpec,
    Storage,
    Weights,
    parameter_specs,
    stored_tensors,
)
from deepinfer.models.loader import INDEX_NAME
from deepinfer.models.random_weights import random_parameter

GetParameter = Callable[[ParameterSpec, int | None], Tensor]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_checkpoint(
    path: str | Path,
    config: ModelConfig,
    weights: Weights,
    max_shard_bytes: int,
    tokenizer_path: str | Path | None = None,
) -> None:
    """Quantises `weights` and writes config.json, model-0000N-of-0000M.safetensors, the index and the tokenizer files.

    Args:
        path: folder, created if absent; shards of an earlier checkpoint there are replaced.
        weights: names and shapes of `parameter_shapes(config)`, any float dtype.
        max_shard_bytes: upper bound of a shard file, header included.
        tokenizer_path: tokenizer.json, or the folder that holds it.

    Raises:
        ValueError: a tensor is missing, extra or misshapen, or one tensor alone exceeds max_shard_bytes.
    """
    specs = parameter_specs(config)
    for name, spec in specs.items():
        if name not in weights:
            raise ValueError(f"weights: {name!r} is missing")
        if tuple(weights[name].shape) != spec.shape:
            raise ValueError(f"weights: {name!r} has shape {list(weights[name].shape)}, expected {list(spec.shape)}")
    for name in sorted(weights.keys() - specs.keys()):
        raise ValueError(f"weights: {name!r} is not a tensor of the model that the config describes")

    def get(spec: ParameterSpec, expert: int | None) -> Tensor:
        weight = weights[spec.name].detach()
        return weight if expert is None else weight[expert]

    _write(Path(path), config, get, max_shard_bytes, tokenizer_path)


def write_synthetic(path: str | Path, config: ModelConfig, seed: int, max_shard_bytes: int = 5 << 30) -> None:
    """Writes `random_weights(config, seed)` without ever holding more than one shard and one tensor."""
    _write(Path(path), config, lambda spec, expert: random_parameter(spec, config, seed, expert), max_shard_bytes, None)


def quantize(storage: Storage, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Float [O, K] or [...] -> (stored values, E8M0 scale bytes as uint8 or None), as the files hold them."""
    if storage == "bf16":
        return weight.to(torch.bfloat16), None
    if storage == "f32":
        return weight.to(torch.float32), None
    if storage == "fp8":
        return quantize_fp8_weight(weight)
    if storage == "fp4":
        return quantize_fp4_weight(weight)
    rows = pack_fp8_row(weight.float())
    columns = weight.shape[-1]
    return rows[..., :columns].contiguous().view(torch.float8_e4m3fn), rows[..., columns:].contiguous()


def _units(config: ModelConfig, get: GetParameter) -> Iterator[dict[str, Tensor]]:
    """The files' tensors in order; a unit is a weight with its scale."""
    for spec in parameter_specs(config).values():
        tensors = list(stored_tensors(spec))
        per_unit = 1 if spec.storage in ("bf16", "f32") else 2
        for start in range(0, len(tensors), per_unit):
            unit = tensors[start : start + per_unit]
            values, scale = quantize(spec.storage, get(spec, unit[0].expert))
            stored = [values] if scale is None else [values, scale.view(torch.float8_e8m0fnu)]
            yield {tensor.name: part.cpu().contiguous() for tensor, part in zip(unit, stored, strict=True)}


def _write(
    path: Path, config: ModelConfig, get: GetParameter, max_shard_bytes: int, tokenizer_path: str | Path | None
) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for old in path.glob("model-*-of-*.safetensors"):
        old.unlink()
    weight_map: dict[str, int] = {}
    shard: dict[str, Tensor] = {}
    shards, shard_bytes, total_size = 0, 0, 0

    def flush() -> None:
        nonlocal shard, shards, shard_bytes
        shards, shard_bytes = shards + 1, 0
        save_file(shard, path / f"shard-{shards}.tmp", metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, shards))
        shard = {}

    for unit in _units(config, get):
        size = sum(_size_in_file(name, tensor) for name, tensor in unit.items())
        if (least := _HEADER_BYTES + size) > max_shard_bytes:
            raise ValueError(
                f"max_shard_bytes is {max_shard_bytes}, allowed: at least {least} for {next(iter(unit))!r}"
            )
        if shard and shard_bytes + least > max_shard_bytes:
            flush()
        shard.update(unit)
        shard_bytes += size
        total_size += sum(tensor.nbytes for tensor in unit.values())
    flush()
    names = {number: f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)}
    for number, name in names.items():
        (path / f"shard-{number}.tmp").rename(path / name)
    index = {"metadata": {"total_size": total_size}, "weight_map": {k: names[n] for k, n in sorted(weight_map.items())}}
    (path / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
    (path / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    if tokenizer_path is not None:
        _copy_tokenizer(Path(tokenizer_path), path)


_HEADER_BYTES = 128  # length word, metadata and padding of a safetensors header


def _size_in_file(name: str, tensor: Tensor) -> int:
    """Data plus an upper bound of its header entry (dtype, shape and two offsets of at most 13 digits)."""
    return tensor.nbytes + len(name.encode()) + 120


def _copy_tokenizer(source: Path, target: Path) -> None:
    folder = source if source.is_dir() else source.parent
    if not (folder / TOKENIZER_FILES[0]).is_file():
        raise ValueError(f"tokenizer_path: no {TOKENIZER_FILES[0]} at {source}")
    for name in TOKENIZER_FILES:
        if (folder / name).is_file() and folder.resolve() != target.resolve():
            shutil.copyfile(folder / name, target / name)
