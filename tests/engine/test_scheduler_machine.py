"""The scheduler under arrivals, cancellations and steps in any order, alone and in groups of ranks, without a model.

Tokens arrive a step late, as under overlapped scheduling, or at once. What each step does is checked against the
rules; at the end everything has finished, and the pools are full again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.scheduler import ScheduledBatch, Scheduler
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.swap import CacheRows, HostSwap
from deepinfer.engine.voting import Lockstep
from deepinfer.outputs import RequestMetrics
from deepinfer.params import SamplingParams
from tests.engine.simulated_group import SimulatedGroup

BLOCK_SIZE = 4
MAX_LEN = 44  # of a sequence, 11 blocks
TOKEN = 1
MAX_DRAFTS = 5


@dataclass
class Rank:
    """A scheduler and a device that does nothing but count; its clock goes on by a second a step."""

    scheduler: Scheduler
    overlap: bool
    rng: random.Random | None = None  # with drafts: how many, and how many of them are accepted
    num_arrived: int = 0
    now: float = 0.0
    alive: list[Sequence] = field(default_factory=list)
    in_flight: list[tuple[Sequence, int]] = field(default_factory=list)  # with the tokens that it may bring
    kinds: list[bool | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.rng is not None:
            self.scheduler.draft_lengths = self.draft_lengths

    def draft_lengths(self, sequences: list[Sequence]) -> list[int]:
        assert self.rng is not None and not any(seq.is_full for seq in sequences)
        room = [max(min(MAX_DRAFTS, seq.max_num_tokens - seq.num_tokens - 1), 0) for seq in sequences]
        return [self.rng.randint(0, most) for most in room]

    def add(self, length: int, max_tokens: int, priority: int, spans: list[tuple[int, int]] = []) -> Sequence:  # noqa: B006
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens, priority=priority)
        seq = Sequence(
            "r", 0, self.num_arrived, [TOKEN] * length, params, 0, RequestMetrics(self.now), MAX_LEN, tuple(spans)
        )
        self.num_arrived += 1
        self.scheduler.add(seq)
        self.alive.append(seq)
        return seq

    def abort(self, seq: Sequence) -> None:
        seq.finish_reason = "abort"
        self.scheduler.remove([seq])
        self.alive.remove(seq)

    def step(self) -> ScheduledBatch | None:
        held = {id(s) for s in self.alive if s.state_slot}
        batch = self.scheduler.schedule()
        sampled: list[tuple[Sequence, int]] = []
        if batch is not None:
            counts = batch.num_tokens if batch.has_drafts else [1] * len(batch.sampled)
            sampled = list(zip(batch.sampled, counts, strict=True))
        if batch is not None:
            self.check(batch, held)
            self.scheduler.advance(batch)
        self.kinds.append(None if batch is None else batch.is_prefill)
        if self.overlap:
            self.read(self.in_flight)
            self.in_flight = sampled
        else:
            self.read(sampled)
        self.now += 1.0
        self.scheduler.check_integrity()
        return batch

    def read(self, sampled: list[tuple[Sequence, int]]) -> None:
        for seq, most in sampled:
            if seq.finish_reason is None:
                count = 1 if self.rng is None else self.rng.randint(1, most)
                for _ in range(count):
                    assert seq.finish_reason is None, "more tokens than it may have"
                    seq.append(TOKEN, ())
                self.scheduler.settle(seq, most, count)
        finished = [seq for seq, _ in sampled if seq.finish_reason == "length" and seq in self.alive]
        self.scheduler.remove(finished)
        for seq in finished:
            self.alive.remove(seq)

    def check(self, batch: ScheduledBatch, held: set[int]) -> None:
        scheduler = self.scheduler
        assert len(batch.sequences) == len(set(map(id, batch.sequences)))
        assert all(s.state_slot and s.finish_reason is None for s in batch.sequences)
        for seq, count in zip(batch.sequences, batch.num_tokens, strict=True):
            drafts = count - 1 if batch.has_drafts else 0
            assert 0 < count and seq.num_computed + count <= seq.num_tokens + drafts <= seq.max_num_tokens
            assert len(seq.block_table) * BLOCK_SIZE >= seq.num_computed + count
        if not batch.is_prefill:
            assert batch.has_drafts == any(count > 1 for count in batch.num_tokens)
            assert all(
                s.num_computed == s.num_tokens - 1 and s.num_tokens > s.num_prompt_tokens for s in batch.sequences
            )
            return
        assert not any(s.num_pending for s in batch.sequences)
        total, largest = sum(batch.num_tokens), max(batch.num_tokens, default=0)
        is_one_image = any((s.num_computed, s.num_computed + n) in s.image_spans for s, n in self.chunks(batch))
        assert total <= scheduler.max_num_batched_tokens or (len(batch.sequences) == 1 and is_one_image)
        assert largest <= scheduler.prefill_chunk_size or is_one_image
        for seq, count in self.chunks(batch):
            end = seq.num_computed + count
            assert not any(first < end < after for first, after in seq.image_spans), "an image is cut"
        admitted = [s for s in self.alive if s.state_slot and id(s) not in held]
        if admitted and held:
            assert scheduler.blocks.num_free >= scheduler.watermark_blocks
        for seq in admitted:
            assert all(seq.order < other.order for other in scheduler.waiting), "the queue was jumped"

    def chunks(self, batch: ScheduledBatch) -> list[tuple[Sequence, int]]:
        return list(zip(batch.sequences, batch.num_tokens, strict=True))

    def assert_empty(self) -> None:
        scheduler = self.scheduler
        assert not self.alive and not scheduler.has_unfinished()
        assert scheduler.blocks.num_free == scheduler.blocks.num_blocks - 1
        assert scheduler.slots.num_free == scheduler.slots.num_slots
        if scheduler.swap is not None:
            assert scheduler.swap.blocks.num_free == scheduler.swap.blocks.num_blocks - 1


def make_rank(
    num_blocks: int,
    overlap: bool,
    pool_rows: int | None,
    lockstep: Lockstep | None = None,
    draft_seed: int | None = None,
    **options: object,
) -> Rank:
    """`pool_rows` None: preempted sequences are recomputed. `draft_seed` None: no drafts."""
    swap = None
    if pool_rows is not None:
        rows = CacheRows([torch.zeros(num_blocks, 2, dtype=torch.uint8)], [torch.zeros(9, 3, dtype=torch.uint8)])
        swap = HostSwap(rows, BLOCK_SIZE, 2 * pool_rows)
    config = EngineConfig(block_size=BLOCK_SIZE, **options)  # type: ignore[arg-type]
    rng = None if draft_seed is None else random.Random(draft_seed)
    return Rank(Scheduler(config, num_blocks, swap, lockstep), overlap, rng)


sizes = {
    "num_blocks": st.integers(12, 30),
    "overlap": st.booleans(),
    "pool_rows": st.none() | st.integers(3, 40),
    "draft_seed": st.none() | st.integers(0, 1000),
    "max_num_seqs": st.integers(1, 6),
    "prefill_chunk_size": st.sampled_from([1, 3, 8, 512]),
    "max_num_batched_tokens": st.sampled_from([4, 9, 2048]),
    "watermark": st.sampled_from([0.0, 0.01, 0.3]),
}


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(kind=st.sampled_from(["normal", "completion"]), **sizes)
    def start(self, **options: object) -> None:
        self.rank = make_rank(**options)  # type: ignore[arg-type]

    @rule(
        length=st.integers(1, MAX_LEN - 1),
        max_tokens=st.integers(1, MAX_LEN),
        priority=st.integers(-1, 1),
        image=st.none() | st.tuples(st.integers(0, 30), st.integers(1, 14)),
    )
    def add(self, length: int, max_tokens: int, priority: int, image: tuple[int, int] | None) -> None:
        spans = [(image[0], image[0] + image[1])] if image and sum(image) <= length else []
        self.rank.add(length, max_tokens, priority, spans)

    @precondition(lambda self: self.rank.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.rank.abort(self.rank.alive[data.draw(st.integers(0, len(self.rank.alive) - 1))])
        self.rank.scheduler.check_integrity()

    @rule(count=st.integers(1, 25))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rank.step()

    def teardown(self) -> None:
        if not hasattr(self, "rank"):
            return
        # Alone, a sequence takes as many steps as it has tokens at most; ten times that is recomputing, not spinning.
        limit = 20 + 20 * MAX_LEN * max(1, len(self.rank.alive))
        while self.rank.alive or self.rank.in_flight:
            self.rank.step()
            limit -= 1
            assert limit, "the scheduler spins"
        self.rank.assert_empty()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)


@dataclass(frozen=True)
class Load:
    """What one rank gets: (step, prompt length, max_tokens, priority, abort this many steps later or never)."""

    arrivals: list[tuple[int, int, int, int, int | None]]
    overlap: bool
    pool_rows: int | None
    num_blocks: int


LAST_ARRIVAL = 30
loads = st.builds(
    Load,
    arrivals=st.lists(
        st.tuples(
            st.integers(0, LAST_ARRIVAL),
            st.integers(1, MAX_LEN - 1),
            st.integers(1, 20),
            st.integers(-1, 1),
            st.none() | st.integers(0, 20),
        ),
        max_size=6,
    ),
    overlap=st.booleans(),
    pool_rows=st.none() | st.integers(3, 30),
    num_blocks=st.integers(12, 24),
)


def run_group(group_loads: list[Load], all_interval: int, any_interval: int) -> list[Rank]:
    """Every rank's schedulers run in lockstep until all work is done; returns the ranks."""
    group = SimulatedGroup(len(group_loads))
    num_requests = sum(len(load.arrivals) for load in group_loads)
    # At worst one request of the whole group moves at a time and waits for an ANY point before each of its chunks.
    limit = LAST_ARRIVAL + 30 + num_requests * (20 * MAX_LEN + 4 * any_interval)

    def program(index: int) -> Rank:
        load = group_loads[index]
        lockstep = Lockstep(group.rank(index), all_interval, any_interval)
        rank = make_rank(
            load.num_blocks, load.overlap, load.pool_rows, lockstep,
            max_num_seqs=4, prefill_chunk_size=16, max_num_batched_tokens=24,
        )  # fmt: skip
        aborts: list[tuple[int, Sequence]] = []
        for number in range(limit):
            for arrival, length, max_tokens, priority, patience in load.arrivals:
                if arrival == number:
                    seq = rank.add(length, max_tokens, priority)
                    if patience is not None:
                        aborts.append((number + patience, seq))
            for when, seq in aborts:
                if when == number and seq in rank.alive:
                    rank.abort(seq)
            batch = rank.step()
            # A group is idle in the same step on every rank; with tokens still to be read, once more.
            if batch is None and number > LAST_ARRIVAL + 21 and rank.kinds[-3:] == [None] * 3:
                return rank
        raise AssertionError("the group spins")

    return group.run(program)


def check_group(group_loads: list[Load], all_interval: int, any_interval: int) -> None:
    ranks = run_group(group_loads, all_interval, any_interval)
    assert len({tuple(rank.kinds) for rank in ranks}) == 1, "a step was not the same kind on every rank"
    for rank in ranks:
        rank.assert_empty()


@settings(max_examples=40, deadline=None)
@given(st.lists(loads, min_size=1, max_size=5), st.integers(1, 12), st.integers(1, 15))
def test_groups_of_ranks_finish_everything_in_lockstep(
    group_loads: list[Load], all_interval: int, any_interval: int
) -> None:
    check_group(group_loads, all_interval, any_interval)


@pytest.mark.parametrize(("size", "seed"), [(16, 0), (64, 1)])
def test_large_groups(size: int, seed: int) -> None:
    """Most ranks get little, a few get everything at once."""
    rng = random.Random(seed)

    def load(busy: bool) -> Load:
        arrivals = [
            (rng.randint(0, LAST_ARRIVAL), rng.randint(1, 40), rng.randint(1, 12), rng.randint(-1, 1), None)
            for _ in range(rng.randint(3, 8) if busy else rng.randint(0, 1))
        ]
        return Load(arrivals, rng.random() < 0.5, rng.choice([None, 12]), rng.randint(12, 24))

    check_group([load(rank % 8 == 0) for rank in range(size)], 7, 10)


def test_a_rank_above_its_watermark_does_not_vote_for_prefill() -> None:
    """One rank's cache is too full for its prompt: an ALL point passes without a prefill, an ANY point does not."""
    group = SimulatedGroup(2)

    def program(index: int) -> list[bool | None]:
        rank = make_rank(30, False, None, Lockstep(group.rank(index), 5, 8), watermark=0.75)
        rank.add(30 if index else 4, 14, 0)
        for number in range(14):
            if number == 3:
                rank.add(4, 1, 0)
            rank.step()
        return rank.kinds

    first, second = group.run(program)
    assert first == second == [True, *[False] * 8, True, *[False] * 4]
