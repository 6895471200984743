"""Reads the public checkpoint format, shard by shard (spec: model, section 2).

`load_weights` gives the model as plain tensors, scales folded in. `load_quantized` keeps the stored bytes, for kernels
that read FP8 / FP4 themselves, and `load_packed_tables` the Engram tables, of which a step reads a few rows.
Every name, shape and dtype is checked against the config from the headers alone, before any data is read.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.kernels.reference.quant import dequantize_fp4_weight, dequantize_fp8_weight, unpack_fp8_row
from deepinfer.models.checkpoint_format import (
    BLOCK,
    FILE_DTYPES,
    ParameterSpec,
    Shape,
    Storage,
    TensorSpec,
    Weights,
    in_memory_dtype,
    parameter_specs,
    stored_tensors,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PROGRESS_BYTES = 1 << 30  # smaller checkpoints are read in a second
E8M0_NAN = 255  # the one byte of a scale that is not a power of two
CHUNK_VALUES = 1 << 18  # values dequantised at a time: keeps the float32 temporaries small and in cache

Include = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A parameter as the file holds it.

    values: BF16 / F32 [...] or, by storage, float8_e4m3fn [O, K] ("fp8", "fp8_rows"), uint8 [(E,) O, K/2] ("fp4").
    scale: uint8 E8M0 bytes, [ceil(O/32), K/32] ("fp8"), [(E,) O, K/32] ("fp4", "fp8_rows"), None otherwise.
    """

    storage: Storage
    values: Tensor
    scale: Tensor | None = None

    @property
    def shape(self) -> Shape:
        """Logical shape: FP4 counts values, not bytes."""
        *rows, columns = self.values.shape
        return (*rows, columns * 2) if self.storage == "fp4" else (*rows, columns)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All values; FP32 tensors of the file stay FP32 for a narrower `dtype`."""
        out = torch.empty(self.shape, dtype=in_memory_dtype(self.storage, dtype), device=self.values.device)
        self.dequantize_into(out)
        return out

    def dequantize_into(self, out: Tensor) -> None:
        """Writes the values to `out` (logical shape, any float dtype or device), a few rows at a time."""
        if self.scale is None:
            out.copy_(self.values)
            return
        values, scale = self.values.flatten(0, -2), self.scale.flatten(0, -2)
        target = out.view(-1, out.shape[-1])
        step = max(CHUNK_VALUES // out.shape[-1], BLOCK) // BLOCK * BLOCK
        for start in range(0, len(target), step):
            rows = slice(start, start + step)
            scale_rows = slice(start // BLOCK, -(-(start + step) // BLOCK)) if self.storage == "fp8" else rows
            chunk = values[rows].to(out.device), scale[scale_rows].to(out.device)
            target[rows] = _dequantize(self.storage, *chunk, out.dtype)


def _dequantize(storage: Storage, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if storage == "fp8":
        return dequantize_fp8_weight(values, scale, dtype)
    if storage == "fp4":
        return dequantize_fp4_weight(values, scale, dtype)
    packed = torch.cat((values.view(torch.uint8), scale), dim=-1)
    return unpack_fp8_row(packed, values.shape[-1], torch.float32).to(dtype)


def load_weights(
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    include: Include | None = None,
) -> Weights:
    """The model of section 2 as dequantised tensors, routed experts stacked ([E, out, in]).

    Args:
        path: folder with model.safetensors.index.json and its shards, or with model.safetensors alone.
        dtype: of everything except tensors stored as FP32, which stay FP32 when `dtype` is narrower.
        include: keep only the parameters whose name satisfies it; the others are neither required nor read.

    Raises:
        ValueError: names the file, or the first missing, extra, misshapen or wrongly typed tensor.
    """
    checkpoint = _open_checkpoint(Path(path), config, include)
    # Allocated before any temporary, which would otherwise leave holes between them.
    weights = {
        name: torch.empty(spec.shape, dtype=in_memory_dtype(spec.storage, dtype), device=device)
        for name, spec in checkpoint.parameters.items()
    }
    for spec, expert, stored in _stream(checkpoint):
        if expert is not None and stored.scale is not None:
            check_finite(spec.name, stored.scale, is_scale=True)
        stored.dequantize_into(weights[spec.name] if expert is None else weights[spec.name][expert])
        del stored  # it keeps its shard mapped
    return weights


def load_quantized(
    path: str | Path,
    config: ModelConfig,
    device: str | torch.device = "cpu",
    include: Include | None = None,
    mmap: bool = False,
) -> dict[str, StoredTensor]:
    """The model as stored bytes, routed experts stacked; arguments and errors as `load_weights`.

    mmap: tensors other than expert stacks stay views of the mapped file and take no memory until read; for Engram
    tables (`include=is_engram_table`). CPU only.
    """
    tensors: dict[str, StoredTensor] = {}
    for spec, expert, stored in _stream(_open_checkpoint(Path(path), config, include)):
        if expert is None:
            tensors[spec.name] = stored if mmap else _copy(stored, device)
        else:
            if spec.name not in tensors:
                tensors[spec.name] = _empty_stack(stored, spec.shape[0], device)
            _fill(tensors[spec.name], expert, stored)
        del stored  # it keeps its shard mapped
    for name, stack in tensors.items():
        if is_routed_expert(name) and stack.scale is not None:
            check_finite(name, stack.scale, is_scale=True)
    return tensors


def load_packed_tables(path: str | Path, config: ModelConfig, device: str | torch.device = "cpu") -> Weights:
    """Engram tables as FP8 cache rows, uint8 [1, rows, dim + dim/32] for `load_rows`; errors as `load_weights`.

    A step reads a few rows of a table, so unpacking them then costs less than a table of four times the size.
    """
    stored = load_quantized(path, config, include=is_engram_table, mmap=True)
    packed: Weights = {}
    for name in list(stored):
        table = stored.pop(name)
        assert table.scale is not None  # FP8 rows have one
        packed[name] = torch.cat((table.values.view(torch.uint8), table.scale), dim=1).unsqueeze(0).to(device)
    return packed


def is_text(name: str) -> bool:
    """True for the tensors of the text model, without draft head and image tower."""
    return not name.startswith(("mtp.", "vision.", "aligner.", "image_"))


def is_draft(name: str) -> bool:
    """True for the tensors of the draft head."""
    return name.startswith("mtp.")


def is_engram_table(name: str) -> bool:
    """True for the n-gram tables, the tensors that are gathered from rather than multiplied with."""
    return name.endswith(".engram.embed.weight")


def is_routed_expert(name: str) -> bool:
    """True for the stacked routed experts (FP4)."""
    return ".ffn.experts." in name


def _empty_stack(expert: StoredTensor, count: int, device: str | torch.device) -> StoredTensor:
    assert expert.scale is not None  # routed experts always have one
    values, scale = (
        torch.empty((count, *t.shape), dtype=t.dtype, device=device) for t in (expert.values, expert.scale)
    )
    return StoredTensor(expert.storage, values, scale)


def _fill(stack: StoredTensor, expert: int, stored: StoredTensor) -> None:
    assert stack.scale is not None and stored.scale is not None
    stack.values[expert].copy_(stored.values)
    stack.scale[expert].copy_(stored.scale)


def _copy(stored: StoredTensor, device: str | torch.device) -> StoredTensor:
    scale = None if stored.scale is None else stored.scale.to(device, copy=True)
    return StoredTensor(stored.storage, stored.values.to(device, copy=True), scale)


# ------------------------------------------------------------------ files


Header = dict[str, tuple[Shape, str]]  # tensor name -> (shape, dtype name)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """What is where, checked against the config."""

    path: Path
    headers: dict[str, Header]  # by shard file
    parameters: dict[str, ParameterSpec]  # the wanted ones
    tensors: dict[str, TensorSpec]  # their file tensors


def _open_checkpoint(path: Path, config: ModelConfig, include: Include | None) -> _Checkpoint:
    headers = {file: _read_header(path / file, names) for file, names in shard_names(path).items()}
    return _Checkpoint(path, headers, *_check(config, headers, include))


def _stream(checkpoint: _Checkpoint) -> Iterator[tuple[ParameterSpec, int | None, StoredTensor]]:
    """Yields (parameter, expert row or None, tensor) one shard at a time; the tensors view the open shard.

    A checkpoint that takes a while to read shows its progress on a terminal.
    """
    path, headers = checkpoint.path, checkpoint.headers
    halves: dict[tuple[str, int | None], dict[str, Tensor]] = {}  # weight or scale, waiting for the other
    size = sum((path / file).stat().st_size for file in headers)
    shows_progress = size > PROGRESS_BYTES and sys.stderr.isatty()
    for number, file in enumerate(headers, 1):
        cut: set[tuple[str, int | None]] = set()  # whose other half is in another shard
        if shows_progress:
            print(f"\rloading weights: shard {number}/{len(headers)}", end="", file=sys.stderr, flush=True)
        with open_shard(path / file) as shard:
            for name in headers[file]:
                tensor = checkpoint.tensors.get(name)
                if tensor is None:
                    continue
                spec = checkpoint.parameters[tensor.parameter]
                key = (spec.name, tensor.expert)
                part = "scale" if tensor.storage == "e8m0" else "values"
                halves.setdefault(key, {})[part] = _get(shard, name, tensor, path / file)
                cut.add(key)
                if len(halves[key]) == (2 if spec.storage in ("fp8", "fp4", "fp8_rows") else 1):
                    cut.remove(key)
                    yield spec, tensor.expert, StoredTensor(spec.storage, **halves.pop(key))
            for key in cut:  # let go of this shard
                halves[key] = {part: value.clone() for part, value in halves[key].items()}
    if shows_progress:
        print(file=sys.stderr)


def shard_names(path: Path) -> dict[str, list[str] | None]:
    """File name -> tensor names the index promises there (None: no index), in file order."""
    index_path = path / INDEX_NAME
    if not index_path.is_file():
        if not (path / SINGLE_NAME).is_file():
            raise ValueError(f"model: neither {INDEX_NAME} nor {SINGLE_NAME} in {path}")
        return {SINGLE_NAME: None}
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        items = [(file, name) for name, file in weight_map.items()]
        if not all(isinstance(file, str) for file, _ in items):
            raise TypeError("weight_map values must be file names")
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"model: {index_path} is not a valid index: {type(error).__name__}: {error}") from None
    shards: dict[str, list[str] | None] = {}
    for file, name in sorted(items):
        if Path(file).name != file:
            raise ValueError(f"model: {index_path} places {name!r} in {file!r}, allowed: a file beside the index")
        names = shards.setdefault(file, [])
        assert names is not None
        names.append(name)
    return shards


def open_shard(path: Path) -> safe_open:
    """An open safetensors file. Raises ValueError naming it if it is missing, truncated or corrupt."""
    try:
        if not path.is_file():
            raise ValueError(f"model: shard {path} is missing")
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else error  # not the path again
        raise ValueError(f"model: shard {path} is truncated or corrupt: {problem}") from None


def _read_header(path: Path, promised: list[str] | None) -> Header:
    """Shapes and dtypes of a shard; the names must be those that the index promises."""
    with open_shard(path) as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}
        header = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    if promised is not None:
        for name in promised:
            if name not in header:
                raise ValueError(f"model: tensor {name!r} is missing from {path}, where the index places it")
        for name in sorted(header.keys() - set(promised)):
            raise ValueError(f"model: {path} holds tensor {name!r}, which the index does not place there")
    return header


def _check(
    config: ModelConfig, headers: dict[str, Header], include: Include | None
) -> tuple[dict[str, ParameterSpec], dict[str, TensorSpec]]:
    """Compares the headers with the config; returns the wanted parameters and file tensors."""
    found = {name: entry for header in headers.values() for name, entry in header.items()}
    every = parameter_specs(config)
    known: set[str] = set()
    wanted: dict[str, TensorSpec] = {}
    for spec in every.values():
        if spec.name.endswith("attn.wo_a.weight") and found.get(spec.name, ((), ""))[1] == "BF16":
            spec = every[spec.name] = replace(spec, storage="bf16")  # converted checkpoints store it widened
        is_wanted = include is None or include(spec.name)
        for tensor in stored_tensors(spec):  # one at a time: a config with too many experts ends at the first of them
            known.add(tensor.name)
            if is_wanted:
                _check_tensor(tensor, found.get(tensor.name))
                wanted[tensor.name] = tensor
    for name in sorted(found.keys() - known):
        raise ValueError(f"model: tensor {name!r} is in the checkpoint but not in the model that config.json describes")
    parameters = {tensor.parameter for tensor in wanted.values()}
    return {name: spec for name, spec in every.items() if name in parameters}, wanted


def _check_tensor(tensor: TensorSpec, found: tuple[Shape, str] | None) -> None:
    """Compares a tensor with its entry in the headers."""
    if found is None:
        raise ValueError(f"model: tensor {tensor.name!r} is missing from the checkpoint")
    shape, dtype = found
    if shape != tensor.shape:
        raise ValueError(f"model: tensor {tensor.name!r} has shape {list(shape)}, expected {list(tensor.shape)}")
    if dtype not in FILE_DTYPES[tensor.storage]:
        allowed = " or ".join(FILE_DTYPES[tensor.storage])
        raise ValueError(f"model: tensor {tensor.name!r} has dtype {dtype}, expected {allowed}")


def _get(shard: safe_open, name: str, tensor: TensorSpec, path: Path) -> Tensor:
    """One tensor as a view of the open shard; packed FP4 and scales as uint8."""
    try:
        value = shard.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"model: tensor {name!r} of shard {path} cannot be read: {error}") from None
    value = value.view(torch.uint8) if tensor.storage in ("fp4", "e8m0") else value
    if tensor.expert is None:  # of the many small experts, whole stacks are checked
        check_finite(name, value, is_scale=tensor.storage == "e8m0")
    return value


def check_finite(name: str, value: Tensor, is_scale: bool = False) -> None:
    """Raise ValueError for a scale that is NaN, or a NaN or infinity in a vector: norms, biases, sinks.

    These are few enough to read twice. One in a matrix shows in the logits, which the engine checks at every step.
    """
    if is_scale:
        if value.numel() and int(value.max()) == E8M0_NAN:
            raise ValueError(f"model: tensor {name!r} has scale byte {E8M0_NAN}, which is NaN; allowed: 0..254")
    elif value.dim() == 1 and not math.isfinite(value.sum(dtype=torch.float64)):
        raise ValueError(f"model: tensor {name!r} holds NaN or infinity, allowed: finite values")
