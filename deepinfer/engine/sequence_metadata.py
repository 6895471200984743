"""SequenceMetadataPool: what every step asks of its sequences, kept from step to step, a row a state slot.

Of a decoding sequence little changes between two steps: once in a while its block table grows, and how its tokens are
drawn never changes. So both lie in arrays, and a step takes its rows out of them with one gather each instead of
walking through the sequences.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf

import numpy as np

from deepinfer.engine.block_manager import NULL_BLOCK
from deepinfer.engine.sequence import Sequence
from deepinfer.observability.memory import StaleReadError
from deepinfer.sampling.sampler import COUNTER, GIVEN, given_token, pack_parameters
from deepinfer.sampling.types import SampledSequence


class SequenceMetadataPool:
    """Rows are brought up to date by `take` and may be read in the same round and in the next one.

    Args:
        num_slots: state slots, null slot included.
        vocab_size: tokens that are drawn from.
        debug: reading a row later than that raises StaleReadError.
    """

    def __init__(self, num_slots: int, vocab_size: int, debug: bool = False) -> None:
        self._vocab_size = vocab_size
        self._debug = debug
        self._round = 0
        self._taken_in = np.full(num_slots, -2)  # the latest round of each row
        self._tables: list[array | None] = [None] * num_slots  # that the rows are of: an admission has its own object
        self._lengths = np.zeros(num_slots, np.int64)  # entries of them that are in the rows
        self._blocks = np.zeros((num_slots, 1), np.int32)
        self._parameters = np.zeros((GIVEN + 1, num_slots), np.int64)
        self._gives_tokens = np.zeros(num_slots, bool)  # see SamplingParams.gives_tokens

    def next_round(self) -> None:
        """Call when a step begins."""
        self._round += 1

    def take(self, sequences: SequenceOf[Sequence]) -> np.ndarray:
        """The state slots int64 [S] of sequences that hold one, whose rows are up to date now."""
        slots = np.array([seq.state_slot for seq in sequences], np.int64)
        tables, new = self._tables, []
        for seq in sequences:
            if tables[seq.state_slot] is not seq.block_table:
                tables[seq.state_slot] = seq.block_table
                new.append(seq)
        if new:
            where = [seq.state_slot for seq in new]
            self._lengths[where] = 0
            self._blocks[where] = NULL_BLOCK
            self._parameters[:, where] = pack_parameters(new, self._vocab_size)
            self._gives_tokens[where] = [seq.params.gives_tokens for seq in new]
        lengths = np.array([len(seq.block_table) for seq in sequences], np.int64)
        for i in np.flatnonzero(lengths > self._lengths[slots]).tolist():
            self._extend(int(slots[i]), sequences[i].block_table)
        self._taken_in[slots] = self._round
        return slots

    def _extend(self, slot: int, table: array) -> None:
        start, end = int(self._lengths[slot]), len(table)
        if end > self._blocks.shape[1]:
            more = max(end, 2 * self._blocks.shape[1]) - self._blocks.shape[1]
            self._blocks = np.pad(self._blocks, ((0, 0), (0, more)), constant_values=NULL_BLOCK)
        self._blocks[slot, start:end] = table[start:]
        self._lengths[slot] = end

    def longest_table(self, slots: np.ndarray) -> int:
        """Blocks of the longest block table of these slots."""
        return int(self._lengths[slots].max())

    def write_block_tables(self, slots: np.ndarray, target: np.ndarray) -> None:
        """Block tables of slots int64 [R] into int32 [at least R, at least the longest], padded with null blocks."""
        self._check(slots)
        width = min(target.shape[1], self._blocks.shape[1])
        target[: len(slots), :width] = self._blocks[slots, :width]
        target[: len(slots), width:] = NULL_BLOCK
        target[len(slots) :] = NULL_BLOCK

    def parameters(self, slots: np.ndarray, counters: np.ndarray, rows: SequenceOf[SampledSequence] = ()) -> np.ndarray:
        """`pack_parameters` int64 [7, R] of the sequences in these slots, which have counters int64 [R] output tokens.

        rows: what the sampler sees there, for tokens that are given.
        """
        self._check(slots)
        packed = self._parameters[:, slots]
        packed[COUNTER] = counters
        if rows:
            for row in np.flatnonzero(self._gives_tokens[slots]).tolist():
                packed[GIVEN, row] = given_token(rows[row])
        return packed

    def _check(self, slots: np.ndarray) -> None:
        if self._debug and len(slots) and self._taken_in[slots].min() < self._round - 1:
            raise StaleReadError("metadata of a sequence was read after its round was over; take it again")
