"""What runs in the next step: continuous batching, chunked prefill and preemption (system spec, "Rules").

A step is homogeneous. Sequences move waiting -> prefilling -> prompted -> running; preemption sends one back to
waiting with its tokens, to be recomputed from position 0. Prefill and decode steps take turns while both have work, so
neither a long prompt nor a stream of arrivals can hold up the other. Progress is certain: a sequence that can never
fit is refused on arrival, and the sequence with the longest output is preempted last.

The next step may be scheduled while the device still draws the tokens of the last one: those are pending, and count. A
sequence that turns out to have ended is in that next step for nothing; one that is known to be full is not.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.block_manager import AllocStatus, BlockManager
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.state_slots import NULL_SLOT, StateSlots


@dataclass(slots=True)
class ScheduledBatch:
    """Sequences of one step; sequence i contributes tokens [num_computed, num_computed + num_tokens[i])."""

    sequences: list[Sequence]
    num_tokens: list[int]
    is_prefill: bool

    @property
    def sampled(self) -> list[Sequence]:
        """Sequences that get a new token: all their tokens are in the cache after this step. Ask before `advance`."""
        if not self.is_prefill:
            return self.sequences
        return [s for s, n in zip(self.sequences, self.num_tokens, strict=True) if s.num_computed + n == len(s)]


class Scheduler:
    def __init__(self, config: EngineConfig, num_blocks: int):
        self.blocks = BlockManager(num_blocks, config.block_size)
        self.slots = StateSlots(config.max_num_seqs)
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.prefill_chunk_size = config.prefill_chunk_size
        self.watermark_blocks = math.ceil(config.watermark * num_blocks)
        self.waiting: deque[Sequence] = deque()  # in order of arrival, holding nothing
        self.prefilling: list[Sequence] = []  # blocks and slot held, prompt partly computed
        self.prompted: list[Sequence] = []  # first token sampled, not decoded yet
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._last_was_prefill = False

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises ValueError if the pool could never hold it."""
        if self.blocks.can_allocate(self.blocks.blocks_for(len(seq))) is AllocStatus.NEVER:
            raise ValueError(f"prompt_token_ids has {len(seq)} tokens, more than the whole block cache holds")
        self.waiting.append(seq)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.prefilling or self.prompted or self.running)

    def schedule(self) -> ScheduledBatch | None:
        """The next step, with its blocks and slots taken; None when there is nothing to do before tokens are read."""
        attempts = [self._schedule_prefill, self._schedule_decode]
        if self._last_was_prefill:
            attempts.reverse()
        batch = attempts[0]() or attempts[1]()
        if batch is None and not any(s.num_pending for s in chain(self.prompted, self.running, self.waiting)):
            if not self.has_unfinished():
                return None
            raise RuntimeError("scheduler found no work although sequences are unfinished")
        self._last_was_prefill = batch is not None and batch.is_prefill
        return batch

    def advance(self, batch: ScheduledBatch) -> None:
        """The step is on its way: for the steps after it, its tokens are in the cache and new ones are pending."""
        for seq in batch.sampled:
            seq.num_pending += 1
        for seq, num_tokens in zip(batch.sequences, batch.num_tokens, strict=True):
            seq.num_computed += num_tokens
        if batch.is_prefill:
            self.prompted += [s for s in batch.sequences if s.num_pending]
            self.prefilling = [s for s in self.prefilling if not s.num_pending]

    def remove(self, sequences: list[Sequence]) -> None:
        """Take finished, failed or aborted sequences out of every queue and free what they hold."""
        held = [seq for seq in sequences if seq.state_slot != NULL_SLOT]
        for seq in held:
            self._release(seq)
        gone = set(map(id, sequences))
        self.running = [s for s in self.running if id(s) not in gone]
        self.prompted = [s for s in self.prompted if id(s) not in gone]
        self.prefilling = [s for s in self.prefilling if id(s) not in gone]
        if len(held) < len(sequences):  # the others were waiting, a queue that may be long
            self.waiting = deque(s for s in self.waiting if id(s) not in gone)

    def check_integrity(self) -> None:
        """Raise RuntimeError if a block or slot leaked or a queue holds a sequence in the wrong state."""
        admitted = [*self.prefilling, *self.prompted, *self.running]
        self.blocks.check_integrity(s.block_table for s in chain(admitted, self.waiting))
        self.slots.check_integrity(s.state_slot for s in admitted)
        arrivals = [s.arrival for s in self.waiting]
        if arrivals != sorted(arrivals):
            raise RuntimeError("waiting sequences are out of order")
        if any(s.num_computed or s.state_slot != NULL_SLOT for s in self.waiting):
            raise RuntimeError("a waiting sequence holds cache")
        if any(s.num_computed >= len(s) for s in self.prefilling):
            raise RuntimeError("a prefilling sequence has nothing left to compute")
        if any(s.num_computed != s.num_tokens - 1 for s in chain(self.prompted, self.running)):
            raise RuntimeError("a decoding sequence must have exactly its last token left to compute")

    def _schedule_prefill(self) -> ScheduledBatch | None:
        """Chunks of admitted prompts first, then new ones in order of arrival while tokens, slots and blocks last."""
        sequences: list[Sequence] = []
        num_tokens: list[int] = []
        budget = self.max_num_batched_tokens
        for seq in chain(list(self.prefilling), self._admit()):
            chunk = min(len(seq) - seq.num_computed, self.prefill_chunk_size, budget)
            sequences.append(seq)
            num_tokens.append(chunk)
            budget -= chunk
            if budget == 0:
                break
        return ScheduledBatch(sequences, num_tokens, is_prefill=True) if sequences else None

    def _admit(self) -> Iterator[Sequence]:
        """Move sequences from waiting to prefilling, oldest first, until one does not fit.

        Blocks for all its tokens are taken at once: prompts that each hold a part of what they need would deadlock.
        """
        while self.waiting and self.slots.num_free:
            seq = self.waiting[0]
            if seq.num_pending:  # preempted a moment ago; what it must recompute is not known yet
                return
            is_idle = self.slots.num_free == self.slots.num_slots
            keep_free = 0 if is_idle else self.watermark_blocks
            if self.blocks.can_allocate(self.blocks.blocks_for(len(seq)), keep_free) is not AllocStatus.OK:
                return
            self.waiting.popleft()
            seq.state_slot = self.slots.allocate()
            self.blocks.extend(seq.block_table, len(seq))
            self.prefilling.append(seq)
            yield seq

    def _schedule_decode(self) -> ScheduledBatch | None:
        """One token for every prompted and running sequence, after preempting until their new blocks fit."""
        self.running += self.prompted
        self.prompted = []
        block_size = self.blocks.block_size
        growing = [s for s in self.running if len(s.block_table) * block_size < s.num_tokens and not s.is_full]
        while len(growing) > self.blocks.num_free:
            victim = min(chain(self.running, self.prefilling), key=lambda s: (s.num_output_tokens, -s.arrival))
            self._preempt(victim)
            growing = [s for s in growing if s is not victim]
        for seq in growing:
            self.blocks.extend(seq.block_table, seq.num_tokens)
        decoding = [s for s in self.running if not s.is_full]
        return ScheduledBatch(decoding, [1] * len(decoding), is_prefill=False) if decoding else None

    def _preempt(self, victim: Sequence) -> None:
        """Send a sequence back to waiting, at its place by arrival, to recompute prompt and output."""
        queue = self.running if victim in self.running else self.prefilling
        queue.remove(victim)
        self._release(victim)
        victim.num_computed = 0
        victim.metrics.num_preemptions += 1
        self.num_preemptions += 1
        # Only earlier victims can be older than this one, so the search is short.
        place = next((i for i, seq in enumerate(self.waiting) if seq.arrival > victim.arrival), len(self.waiting))
        self.waiting.insert(place, victim)

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq.block_table)
        self.slots.free(seq.state_slot)
        seq.state_slot = NULL_SLOT
