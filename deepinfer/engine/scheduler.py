"""What runs in the next step: continuous batching, chunked prefill and preemption (system spec, "Rules").

A step is homogeneous. Sequences move waiting -> prefilling -> prompted -> running; preemption sends one back to
waiting, with its cache on the host (swap.py) or to be recomputed from position 0. Prefill and decode steps take turns
while both have work, so neither a long prompt nor a stream of arrivals can hold up the other; the ranks of a
data-parallel group vote instead (voting.py). Progress is certain: a sequence that can never fit is refused on arrival,
the queue has a fixed order in which nobody is overtaken for ever (order.py), and whoever has the longest output there
is preempted last.

The next step may be scheduled while the device still draws the tokens of the last one: those are pending, and count. A
sequence that turns out to have ended is in that next step for nothing; one that is known to be full is not.
"""

import math
from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.block_manager import AllocStatus, BlockManager
from deepinfer.engine.chunking import MAX_ASKED, PrefillCost, StepBudget
from deepinfer.engine.order import victim_of
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.state_slots import NULL_SLOT, StateSlots
from deepinfer.engine.swap import HostSwap
from deepinfer.engine.voting import Lockstep, StepKind
from deepinfer.observability.block_lifetimes import BlockLifetimes

# Prefill steps in a row while there is something to decode.
PREFILLS_IN_TURN = {"normal": 1, "decode": 1, "completion": 4}


@dataclass(slots=True)
class ScheduledBatch:
    """Sequences of one step; sequence i contributes num_tokens[i] tokens, those from num_computed on if it prefills."""

    sequences: list[Sequence]
    num_tokens: list[int]
    is_prefill: bool
    has_drafts: bool = False  # a decode step: a sequence's tokens are its last one and drafts

    @property
    def sampled(self) -> list[Sequence]:
        """Sequences that get a new token: all their tokens are in the cache after this step. Ask before `advance`."""
        if not self.is_prefill:
            return self.sequences
        return [s for s, n in zip(self.sequences, self.num_tokens, strict=True) if s.num_computed + n == len(s)]


class Scheduler:
    """
    Args:
        config: sizes and policy.
        num_blocks: cache blocks, null block included.
        swap: where preempted sequences go; None: they are recomputed.
        lockstep: this rank's side of a data-parallel group; None: the engine is alone.
        lifetimes: of the blocks, for statistics.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        swap: HostSwap | None = None,
        lockstep: Lockstep | None = None,
        lifetimes: BlockLifetimes | None = None,
    ):
        self.blocks = BlockManager(num_blocks, config.block_size, lifetimes)
        self.slots = StateSlots(config.max_num_seqs)
        self.swap = swap
        self.lockstep = lockstep
        self.prefill_cost = PrefillCost()
        self.prefill_step_ms = config.prefill_step_ms
        self.max_num_batched_tokens = config.step_tokens
        self.prefill_chunk_size = config.chunk_tokens
        self.max_asked = MAX_ASKED  # prompt tokens that a step finds the chances of; an engine knows its vocabulary
        self.watermark_blocks = math.ceil(config.watermark * num_blocks)
        self.waiting: deque[Sequence] = deque()  # by Sequence.order, holding nothing on the device
        self.prefilling: list[Sequence] = []  # blocks and slot held, prompt partly computed
        self.prompted: list[Sequence] = []  # first token sampled, not decoded yet
        self.running: list[Sequence] = []
        self.handed_over: list[Sequence] = []  # taken from a prefill engine, cache held until it is copied
        self.num_preemptions = 0
        # How many drafts of each sequence a decode step verifies; None: there are none.
        self.draft_lengths: Callable[[list[Sequence]], list[int]] | None = None
        self._prefills_in_turn = PREFILLS_IN_TURN.get(config.kind)  # None: this engine does not decode
        self._prefills_in_a_row = 0

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises ValueError if the pool could never hold it."""
        if self.blocks.can_allocate(self.blocks.blocks_for(len(seq))) is AllocStatus.NEVER:
            raise ValueError(f"prompt_token_ids has {len(seq)} tokens, more than the whole block cache holds")
        insort(self.waiting, seq, key=lambda s: s.order)

    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs; handed over ones do not count."""
        return bool(self.waiting or self.prefilling or self.prompted or self.running)

    def schedule(self) -> ScheduledBatch | None:
        """The next step, with its blocks and slots taken.

        None when there is nothing to do before tokens are read, or sequences are taken, or, in a group, on any rank.
        A rank of a group that has nothing to do while others have gets an empty batch.
        """
        if self.lockstep is not None:
            kind, batch = self.lockstep.next_step(self._wants_prefill, self._schedule_prefill, self._schedule_decode)
            return batch or (None if kind is StepKind.IDLE else ScheduledBatch([], [], kind is StepKind.PREFILL))
        if self._prefills_in_turn is None:
            return self._schedule_prefill()
        if self._prefills_in_a_row < self._prefills_in_turn:
            batch = self._schedule_prefill() or self._schedule_decode()
        else:  # the last attempt is for what the second one brought back from the host
            batch = self._schedule_decode() or self._schedule_prefill() or self._schedule_decode()
        if batch is None and not any(s.num_pending for s in chain(self.prompted, self.running, self.waiting)):
            if not self.has_unfinished():
                return None
            raise RuntimeError("scheduler found no work although sequences are unfinished")
        self._prefills_in_a_row = self._prefills_in_a_row + 1 if batch is not None and batch.is_prefill else 0
        return batch

    def advance(self, batch: ScheduledBatch) -> None:
        """The step is on its way: for the steps after it, its tokens are in the cache and new ones are pending."""
        for seq in batch.sampled:
            seq.num_pending += 1
        for seq, num_tokens in zip(batch.sequences, batch.num_tokens, strict=True):
            seq.num_computed += num_tokens
            if batch.has_drafts:
                seq.num_pending += num_tokens - 1
        if batch.is_prefill:
            self.prompted += [s for s in batch.sequences if s.num_pending]
            self.prefilling = [s for s in self.prefilling if not s.num_pending]

    def settle(self, seq: Sequence, num_expected: int, num_appended: int) -> None:
        """A step with drafts is read: of the tokens that it could have brought only these came.

        Blocks that were taken for the others stay with the sequence, which is about to need them.
        """
        shortfall = num_expected - num_appended
        seq.num_pending -= shortfall
        if seq.num_computed:  # else its cache is gone
            seq.num_computed -= shortfall
            if self.swap is not None:
                self.swap.trim(seq)

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
            if self.swap is not None:
                for seq in sequences:
                    self.swap.drop(seq)

    def take_prefilled(self) -> list[Sequence]:
        """Sequences that have their first token, for a decode engine; they keep their cache until `release_taken`."""
        taken = [s for s in self.prompted if not s.num_pending]
        self.prompted = [s for s in self.prompted if s.num_pending]
        self.handed_over += taken
        return taken

    def release_taken(self, seq: Sequence) -> None:
        """The cache of a sequence from `take_prefilled` has been copied, or is not wanted."""
        self.handed_over.remove(seq)
        self._release(seq)

    def add_prefilled(self, seq: Sequence) -> bool:
        """Take in a sequence whose cache the caller is about to fill up to its last token; False: no room now.

        Whoever was preempted here comes first.
        """
        if self.waiting or not self._fits(seq):
            return False
        self._hold(seq)
        seq.num_computed = len(seq) - 1
        self.prompted.append(seq)
        return True

    def check_integrity(self) -> None:
        """Raise RuntimeError if a block or slot leaked or a queue holds a sequence in the wrong state."""
        admitted = [*self.prefilling, *self.prompted, *self.running]
        holding = [*admitted, *self.handed_over]
        self.blocks.check_integrity(s.block_table for s in chain(holding, self.waiting))
        self.slots.check_integrity(s.state_slot for s in holding)
        if self.swap is not None:
            self.swap.check_integrity(self.waiting)
        orders = [s.order for s in self.waiting]
        if orders != sorted(orders):
            raise RuntimeError("waiting sequences are out of order")
        if any((s.num_computed and not s.host_blocks) or s.state_slot != NULL_SLOT for s in self.waiting):
            raise RuntimeError("a waiting sequence holds cache")
        if any(s.host_blocks for s in holding):
            raise RuntimeError("a sequence is on the device and on the host")
        if any(s.num_computed >= len(s) for s in self.prefilling):
            raise RuntimeError("a prefilling sequence has nothing left to compute")
        if any(s.num_computed != s.num_tokens - 1 for s in chain(self.prompted, self.running)):
            raise RuntimeError("a decoding sequence must have exactly its last token left to compute")

    def _wants_prefill(self) -> bool:
        """Whether there is prefill work, and the cache below its watermark if it needs more of that."""
        below = self._is_idle or self.blocks.num_free >= self.watermark_blocks
        return bool(self.prefilling) or (bool(self.waiting) and below)

    def _schedule_prefill(self) -> ScheduledBatch | None:
        """Chunks of admitted prompts first, then of those that wait while tokens, time, slots and blocks last."""
        sequences: list[Sequence] = []
        num_tokens: list[int] = []
        budget = StepBudget(
            self.max_num_batched_tokens,
            self.prefill_chunk_size,
            self.prefill_cost,
            self.prefill_step_ms,
            self.max_asked,
        )
        for seq in chain(list(self.prefilling), self._admit()):
            chunk = budget.take(seq.num_computed, len(seq), seq.image_spans, seq.asks_prompt_logprobs)
            if chunk == 0:
                break
            sequences.append(seq)
            num_tokens.append(chunk)
            if budget.tokens == 0:
                break
        return ScheduledBatch(sequences, num_tokens, is_prefill=True) if sequences else None

    def _admit(self) -> Iterator[Sequence]:
        """Take sequences from the waiting queue, in its order, until one does not fit; yields those to prefill.

        Blocks for all its tokens are taken at once: prompts that each hold a part of what they need would deadlock.
        """
        while self.waiting:
            seq = self.waiting[0]
            if seq.num_pending:  # preempted a moment ago; what it must recompute is not known yet
                return
            if not self._fits(seq):
                return
            self.waiting.popleft()
            self._hold(seq)
            if seq.host_blocks:
                assert self.swap is not None
                self.swap.swap_in(seq)
            if seq.num_output_tokens and seq.num_computed == len(seq) - 1:
                self.prompted.append(seq)
            else:
                self.prefilling.append(seq)
                yield seq

    @property
    def _is_idle(self) -> bool:
        return self.slots.num_free == self.slots.num_slots

    def _fits(self, seq: Sequence) -> bool:
        keep_free = 0 if self._is_idle else self.watermark_blocks
        needed = self.blocks.blocks_for(len(seq))
        return self.slots.num_free > 0 and self.blocks.can_allocate(needed, keep_free) is AllocStatus.OK

    def _hold(self, seq: Sequence) -> None:
        seq.state_slot = self.slots.allocate()
        seq.block_table = array("i")  # a new object: SequenceMetadataPool tells one admission from another by it
        self.blocks.extend(seq.block_table, len(seq))

    def _schedule_decode(self) -> ScheduledBatch | None:
        """A token for every prompted and running sequence, and drafts, after preempting until their new blocks fit.

        Drafts never preempt anybody: if their blocks do not fit, there are none in this step.
        """
        self.running += self.prompted
        self.prompted = []
        decoding = [s for s in self.running if not s.is_full]
        drafts = self._drafts_that_fit(decoding)
        if drafts is not None:
            return ScheduledBatch(decoding, [1 + count for count in drafts], is_prefill=False, has_drafts=True)
        growing = self._growing(decoding)
        while self._missing_blocks(growing) > self.blocks.num_free:
            victim = victim_of(chain(self.running, self.prefilling))
            self._preempt(victim)
            growing = [(seq, length) for seq, length in growing if seq is not victim]
        self._grow(growing)
        decoding = [s for s in decoding if s.state_slot != NULL_SLOT]
        return ScheduledBatch(decoding, [1] * len(decoding), is_prefill=False) if decoding else None

    def _drafts_that_fit(self, decoding: list[Sequence]) -> list[int] | None:
        """How many drafts of each of these sequences are verified, with their blocks taken; None: none at all."""
        if self.draft_lengths is None or not decoding:
            return None
        drafts = self.draft_lengths(decoding)
        if not any(drafts):
            return None
        growing = self._growing(decoding, drafts)
        if self._missing_blocks(growing) > self.blocks.num_free:
            return None
        self._grow(growing)
        return drafts

    def _growing(self, sequences: list[Sequence], more: Iterable[int] = repeat(0)) -> list[tuple[Sequence, int]]:
        """Sequences whose blocks do not hold their tokens and so many more, and how many tokens these are together."""
        block_size = self.blocks.block_size
        lengths = ((s, s.num_tokens + n) for s, n in zip(sequences, more, strict=False))
        return [(s, length) for s, length in lengths if len(s.block_table) * block_size < length]

    def _missing_blocks(self, growing: list[tuple[Sequence, int]]) -> int:
        return sum(self.blocks.blocks_for(length) - len(s.block_table) for s, length in growing)

    def _grow(self, growing: list[tuple[Sequence, int]]) -> None:
        for seq, length in growing:
            self.blocks.extend(seq.block_table, length)

    def _preempt(self, victim: Sequence) -> None:
        """Send a sequence back to its place in the waiting queue, its cache to the host or away."""
        queue = self.running if victim in self.running else self.prefilling
        queue.remove(victim)
        if self.swap is None or not self.swap.swap_out(victim):
            victim.num_computed = 0
        self._release(victim)
        victim.has_drafts = False  # they are where its slot was
        victim.metrics.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, victim, key=lambda s: s.order)

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq.block_table)
        self.slots.free(seq.state_slot)
        seq.state_slot = NULL_SLOT
