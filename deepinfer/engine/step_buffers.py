"""Inputs of a step packed into one buffer, which one copy brings to the device; the stable one that CUDA graphs read.

Every shape of a padded decode step has its own layout of the same device memory: steps are in stream order, so the next
one is written only after the last one has been read. On the host there are two pinned buffers in turn: one is filled
while the copy out of the other may still be under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from deepinfer.models.inputs import ModelInputs
from deepinfer.speculation.slot_tokens import SlotTokens

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


def upload(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays on the device, through one copy that the host does not wait for. On a CPU they share the memory.

    PyTorch keeps pinned blocks for reuse and hands one out again only when the copy out of it is done.
    """
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return tensors
    *offsets, size = packed_offsets(array.nbytes for array in arrays)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    raw = host.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        raw[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    buffer = host.to(device, non_blocking=True)
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
        """Of the inputs of a step of this shape, packed."""
        return packed_offsets(prod(shape) * dtype.itemsize for dtype, shape in self.parts())[-1]


class StepBuffers:
    """One buffer for every shape up to `largest`; `inputs(shape)` are views of it.

    A token id below 0 in the buffer stands for one of `slot_tokens`: the host does not know it yet. They are made for
    steps of one row a sequence unless they are given.
    """

    def __init__(self, largest: StepShape, device: torch.device | str, slot_tokens: SlotTokens | None = None) -> None:
        self.storage = torch.zeros(largest.num_bytes(), dtype=torch.uint8, device=device)
        self.slot_tokens = slot_tokens or SlotTokens.allocate(largest.rows + 1, 0, device)
        on_gpu = self.storage.is_cuda
        self._host = [torch.zeros_like(self.storage, device="cpu", pin_memory=on_gpu) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if on_gpu else []
        self._arrays: dict[tuple[StepShape, int], list[np.ndarray]] = {}
        self._next = 0
        self._query_start = torch.arange(largest.rows + 1, dtype=torch.int32, device=device)
        self._logits_rows = torch.arange(largest.rows, device=device)

    def host_arrays(self, shape: StepShape) -> list[np.ndarray]:
        """Where the host writes the parts of the next step, for `upload`; what they hold is of an earlier step."""
        if self._copied:
            self._copied[self._next].synchronize()  # of two steps ago
        key = shape, self._next
        if key not in self._arrays:
            self._arrays[key] = [view.numpy() for view in packed_views(self._host[self._next], shape.parts())]
        return self._arrays[key]

    def upload(self, shape: StepShape) -> None:
        """Bring what `host_arrays` were filled with to the device, by one copy that the host does not wait for."""
        size = shape.num_bytes()
        self.storage[:size].copy_(self._host[self._next][:size], non_blocking=True)
        if self._copied:
            self._copied[self._next].record()
        self._next ^= 1

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
