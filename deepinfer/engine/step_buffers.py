"""Inputs of a step packed into one buffer, which one copy brings to the device; the stable one that CUDA graphs read.

Every shape of a padded decode step has its own layout of the same device memory: steps are in stream order, so the next
one is written only after the last one has been read. On the host each step gets a pinned block of its own, which
PyTorch keeps for reuse and hands out again only when the copy out of it is done: the host may be steps ahead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from deepinfer.models.inputs import ModelInputs

ALIGNMENT = 16  # bytes; kernels may load vectors


Part = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a packed tensor


def packed_offsets(sizes: Iterable[int]) -> list[int]:
    """Where regions of `sizes` bytes begin, each aligned, and the bytes of all."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets


def packed_views(buffer: Tensor, parts: list[Part]) -> list[Tensor]:
    """Contiguous tensors laid one behind the other in `buffer` uint8 [at least as many bytes as they take]."""
    sizes = [prod(shape) * dtype.itemsize for dtype, shape in parts]
    return [
        buffer[offset : offset + size].view(dtype).view(shape)
        for (dtype, shape), size, offset in zip(parts, sizes, packed_offsets(sizes), strict=False)
    ]


def pack(arrays: list[np.ndarray], device: torch.device) -> Tensor:
    """The arrays one behind the other, uint8 on the host, pinned for a copy to a GPU."""
    *offsets, size = packed_offsets(array.nbytes for array in arrays)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    raw = host.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        raw[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    return host


def upload(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays on the device, through one copy that the host does not wait for. On a CPU they share the memory."""
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return tensors
    buffer = pack(arrays, device).to(device, non_blocking=True)
    return packed_views(buffer, [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])


@dataclass(frozen=True)
class StepShape:
    """Rows (sequences) and block-table columns of a padded decode step."""

    rows: int
    blocks: int

    def parts(self) -> list[Part]:
        """token_ids, positions, context_lens, state_slots, block_tables."""
        rows = (self.rows,)
        return [
            (torch.int64, rows),
            (torch.int64, rows),
            (torch.int32, rows),
            (torch.int32, rows),
            (torch.int32, (self.rows, self.blocks)),
        ]

    def num_bytes(self) -> int:
        return packed_offsets(prod(shape) * dtype.itemsize for dtype, shape in self.parts())[-1]


class StepBuffers:
    """One buffer for every shape up to `largest`; `inputs(shape)` are views of it."""

    def __init__(self, largest: StepShape, device: torch.device | str) -> None:
        self.storage = torch.zeros(largest.num_bytes(), dtype=torch.uint8, device=device)
        self._query_start = torch.arange(largest.rows + 1, dtype=torch.int32, device=device)
        self._logits_rows = torch.arange(largest.rows, device=device)

    def write(self, arrays: list[np.ndarray]) -> None:
        """Fill the buffer with the parts of a shape, by one copy that the host does not wait for."""
        packed = pack(arrays, self.storage.device)
        self.storage[: len(packed)].copy_(packed, non_blocking=True)

    def inputs(self, shape: StepShape) -> ModelInputs:
        """Inputs of a step of this shape, whatever the buffer holds at the moment."""
        token_ids, positions, context_lens, state_slots, block_tables = packed_views(self.storage, shape.parts())
        query_start, logits_rows = self._query_start[: shape.rows + 1], self._logits_rows[: shape.rows]
        return ModelInputs(
            False, token_ids, positions, query_start, context_lens, block_tables, state_slots, logits_rows
        )


def first_rows(inputs: ModelInputs, num_rows: int) -> ModelInputs:
    """A decode step of the first sequences only, in the same memory."""
    return replace(
        inputs,
        token_ids=inputs.token_ids[:num_rows],
        positions=inputs.positions[:num_rows],
        query_start=inputs.query_start[: num_rows + 1],
        context_lens=inputs.context_lens[:num_rows],
        block_tables=inputs.block_tables[:num_rows],
        state_slots=inputs.state_slots[:num_rows],
        logits_rows=inputs.logits_rows[:num_rows],
    )


def pad_inputs(inputs: ModelInputs, padded: ModelInputs) -> None:
    """Copy a decode step into the larger `padded`; the rows behind it read and write the null block and slot only."""
    num_rows, num_blocks = inputs.block_tables.shape
    padded.token_ids[:num_rows] = inputs.token_ids
    padded.positions[:num_rows] = inputs.positions
    padded.context_lens[:num_rows] = inputs.context_lens
    padded.state_slots[:num_rows] = inputs.state_slots
    padded.block_tables[:num_rows, :num_blocks] = inputs.block_tables
    padded.block_tables[:num_rows, num_blocks:] = 0
    for rest in (padded.token_ids, padded.positions, padded.state_slots, padded.block_tables):
        rest[num_rows:] = 0
    padded.context_lens[num_rows:] = 1
