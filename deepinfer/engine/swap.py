"""Swap to host: a preempted sequence leaves the device with its cache and comes back without being recomputed.

The host pool is one tensor of rows as large as one cache block in all layers; it is pinned if the caches are on a GPU.
A sequence takes a row for each block that holds tokens, and as many as its state needs. All copies are issued to the
current stream: they run after the steps launched before and in front of those launched after, and the host waits for
none of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.engine.block_manager import AllocStatus, BlockManager
from deepinfer.engine.sequence import Sequence as TokenSequence

STAGED_BLOCKS = 256  # most blocks that are gathered on the device at once: a long sequence may not exhaust its memory


@dataclass
class CacheRows:
    """The tensors of a model's caches as bytes, uint8: `blocks` each [num_blocks, n], `slots` each [num_slots, n].

    They are views: writing to them writes to the caches.
    """

    blocks: list[Tensor]
    slots: list[Tensor]

    @classmethod
    def of(cls, caches: Any) -> CacheRows:
        """Of a model: block tensors by layer, and for the state either one byte storage or tensors by layer."""
        blocks = [*caches.blocks.latents.values(), *caches.blocks.index_keys.values()]
        state = caches.state
        if hasattr(state, "storage"):
            slots = [state.storage]
        else:
            slots = [*state.rings, *state.carry.values(), *state.index_carry.values()]
        return cls(as_bytes(blocks), as_bytes(slots))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(tensor.shape[1] for tensor in self.blocks)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one state slot over all layers."""
        return sum(tensor.shape[1] for tensor in self.slots)

    @property
    def device(self) -> torch.device:
        """Where the caches are."""
        return self.slots[0].device


def as_bytes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Contiguous tensors as views uint8 [len, bytes of a row]."""
    return [tensor.flatten(1).view(torch.uint8) for tensor in tensors]


def copy_sequence(
    source: CacheRows, source_blocks: Sequence[int], source_slot: int,
    target: CacheRows, target_blocks: Sequence[int], target_slot: int,
) -> None:  # fmt: skip
    """Copy a sequence's blocks and state from one engine's caches to another's of the same model.

    One block table may be longer by a block for the next token, which has no content yet.
    """
    num_blocks = min(len(source_blocks), len(target_blocks)) if source.blocks else 0
    for part in _parts(num_blocks):
        blocks = _gather(source.blocks, list(source_blocks[part]))
        _scatter(blocks.to(target.device), target.blocks, list(target_blocks[part]))
    _scatter(_gather(source.slots, [source_slot]).to(target.device), target.slots, [target_slot])


class HostSwap:
    """Host memory for preempted sequences. `Sequence.host_blocks` are the rows that one holds.

    Args:
        rows: the caches of the device.
        memory_bytes: size of the pool.

    Raises:
        ValueError: the pool does not hold even one sequence of one block, or is more than the host can give.
    """

    def __init__(self, rows: CacheRows, block_size: int, memory_bytes: int):
        self.rows = rows
        self.block_size = block_size
        self.row_bytes = rows.block_bytes or rows.slot_bytes  # a model of sliding windows only has no blocks to move
        self.rows_of_state = -(-rows.slot_bytes // self.row_bytes)
        num_rows = memory_bytes // self.row_bytes
        least = self.rows_of_state + 1
        if num_rows < least:
            raise ValueError(
                f"swap_memory_bytes must be at least {least * self.row_bytes}, which one sequence takes, "
                f"got {memory_bytes}"
            )
        self.is_async = rows.device.type == "cuda"
        try:
            self.pool = torch.empty(num_rows, self.row_bytes, dtype=torch.uint8, pin_memory=self.is_async)
        except RuntimeError as error:
            raise ValueError(f"swap_memory_bytes is {memory_bytes}, which this host cannot give: {error}") from error
        self.blocks = BlockManager(num_rows + 1, block_size)  # row i is block i + 1
        self.num_swapped_out = 0

    def swap_out(self, seq: TokenSequence) -> bool:
        """Copy the sequence's cache to the host. False, and nothing done, if it has none or there is no room."""
        num_blocks = self._num_blocks(seq)
        needed = num_blocks + self.rows_of_state
        if seq.num_computed == 0 or self.blocks.can_allocate(needed) is not AllocStatus.OK:
            return False
        seq.host_blocks.extend(self.blocks.allocate(needed))
        for part in _parts(num_blocks):
            self._to_host(_gather(self.rows.blocks, list(seq.block_table[part])), seq.host_blocks[part])
        state = _gather(self.rows.slots, [seq.state_slot])
        padded = state.new_zeros(self.rows_of_state * self.row_bytes)
        padded[: state.shape[1]] = state[0]
        self._to_host(padded.view(self.rows_of_state, self.row_bytes), seq.host_blocks[num_blocks:])
        self.num_swapped_out += 1
        return True

    def swap_in(self, seq: TokenSequence) -> None:
        """Copy the sequence's cache back, into the blocks and the slot that it holds now."""
        num_blocks = self._num_blocks(seq)
        for part in _parts(num_blocks):
            _scatter(self._to_device(seq.host_blocks[part]), self.rows.blocks, list(seq.block_table[part]))
        state = self._to_device(seq.host_blocks[num_blocks:]).view(1, -1)[:, : self.rows.slot_bytes]
        _scatter(state, self.rows.slots, [seq.state_slot])
        self.drop(seq)

    def trim(self, seq: TokenSequence) -> None:
        """Free the host rows of blocks that turned out to hold nothing but drafts that were not accepted."""
        first, behind = self._num_blocks(seq), len(seq.host_blocks) - self.rows_of_state
        if seq.host_blocks and first < behind:
            self.blocks.free(seq.host_blocks[first:behind])
            del seq.host_blocks[first:behind]

    def drop(self, seq: TokenSequence) -> None:
        """Free the host rows of a sequence; later copies into them come after those out of them in stream order."""
        self.blocks.release(seq.host_blocks)

    def check_integrity(self, waiting: Iterable[TokenSequence]) -> None:
        """Raise RuntimeError if rows leaked, or a sequence does not hold what its computed tokens take."""
        swapped = [seq for seq in waiting if seq.host_blocks]
        self.blocks.check_integrity(seq.host_blocks for seq in swapped)
        if any(len(seq.host_blocks) != self._num_blocks(seq) + self.rows_of_state for seq in swapped):
            raise RuntimeError("a swapped sequence does not hold what its tokens take")

    def _num_blocks(self, seq: TokenSequence) -> int:
        """Blocks with content: the last one of the block table may be for the next token only."""
        return self.blocks.blocks_for(seq.num_computed) if self.rows.blocks else 0

    def _to_host(self, rows: Tensor, host_blocks: array) -> None:
        if not self.is_async:
            self.pool.index_copy_(0, torch.tensor(host_blocks) - 1, rows)
            return
        for at, begin, count in _runs(host_blocks):
            self.pool[begin - 1 : begin - 1 + count].copy_(rows[at : at + count], non_blocking=True)

    def _to_device(self, host_blocks: array) -> Tensor:
        if not self.is_async:
            return self.pool.index_select(0, torch.tensor(host_blocks) - 1)
        rows = torch.empty(len(host_blocks), self.row_bytes, dtype=torch.uint8, device=self.rows.device)
        for at, begin, count in _runs(host_blocks):
            rows[at : at + count].copy_(self.pool[begin - 1 : begin - 1 + count], non_blocking=True)
        return rows


def _gather(tensors: list[Tensor], ids: list[int]) -> Tensor:
    """Rows `ids` of all tensors side by side, uint8 [len(ids), sum of row bytes]."""
    index = _index(ids, tensors[0].device)
    return torch.cat([tensor.index_select(0, index) for tensor in tensors], 1)


def _scatter(rows: Tensor, tensors: list[Tensor], ids: list[int]) -> None:
    """The way back of `_gather`."""
    index = _index(ids, tensors[0].device)
    for tensor, part in zip(tensors, rows.split([tensor.shape[1] for tensor in tensors], 1), strict=True):
        tensor.index_copy_(0, index, part)


def _index(ids: list[int], device: torch.device) -> Tensor:
    index = torch.tensor(ids, dtype=torch.int64)
    if device.type != "cuda":
        return index
    return index.pin_memory().to(device, non_blocking=True)


def _parts(num_blocks: int) -> Iterator[slice]:
    """[0, num_blocks) in parts that are staged one after the other."""
    for start in range(0, num_blocks, STAGED_BLOCKS):
        yield slice(start, min(start + STAGED_BLOCKS, num_blocks))


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(position, first block, length) of each stretch of consecutive block ids: one copy each."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1:
            yield start, blocks[start], end - start
            start = end
