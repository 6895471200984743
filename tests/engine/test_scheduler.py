"""Admission, watermark, chunking and preemption, one decision at a time."""

import pytest

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.scheduler import ScheduledBatch, Scheduler
from deepinfer.engine.sequence import Sequence
from deepinfer.outputs import RequestMetrics
from deepinfer.params import SamplingParams


def make_scheduler(num_blocks: int, **options: object) -> Scheduler:
    return Scheduler(EngineConfig(block_size=4, max_num_seqs=8, **options), num_blocks)


def add(scheduler: Scheduler, arrival: int, length: int) -> Sequence:
    params = SamplingParams(temperature=0, ignore_eos=True)
    seq = Sequence(str(arrival), 0, arrival, [1] * length, params, 0, RequestMetrics(0.0))
    scheduler.add(seq)
    return seq


def step(scheduler: Scheduler) -> ScheduledBatch:
    """Schedule and pretend to run: every sampled sequence gets token 1."""
    batch = scheduler.schedule()
    assert batch is not None and batch.sequences
    sampled = batch.sampled
    scheduler.advance(batch)
    for seq in sampled:
        seq.append(1, ())
    scheduler.check_integrity()
    return batch


def test_a_sequence_that_never_fits_is_refused() -> None:
    scheduler = make_scheduler(4)
    add(scheduler, 0, 12)
    with pytest.raises(ValueError, match="more than the whole block cache"):
        add(scheduler, 1, 13)
    assert [seq.arrival for seq in scheduler.waiting] == [0]


def test_nothing_to_do_is_none() -> None:
    scheduler = make_scheduler(4)
    assert scheduler.schedule() is None
    seq = add(scheduler, 0, 4)
    step(scheduler)
    scheduler.remove([seq])
    assert scheduler.schedule() is None
    scheduler.check_integrity()


def test_watermark_keeps_blocks_free_beside_running_sequences_only() -> None:
    scheduler = make_scheduler(11, watermark=0.25)  # 10 blocks; ceil(2.75) = 3 stay free
    first = add(scheduler, 0, 40)  # alone it may take them all
    assert step(scheduler).sequences == [first]
    scheduler.remove([first])
    small = [add(scheduler, i, 8) for i in range(1, 6)]  # 2 blocks each
    assert step(scheduler).sequences == small[:3]  # a fourth would leave 2 free
    assert scheduler.blocks.num_free == 4
    for seq in small[:3]:
        scheduler.remove([seq])
    assert step(scheduler).sequences == small[3:]


def test_chunks_share_the_step_budget_in_order_of_arrival() -> None:
    scheduler = make_scheduler(100, prefill_chunk_size=6, max_num_batched_tokens=10)
    a, b, c = (add(scheduler, i, 9) for i in range(3))
    steps = [step(scheduler) for _ in range(7)]
    assert [(batch.is_prefill, batch.sequences, batch.num_tokens) for batch in steps] == [
        (True, [a, b], [6, 4]),
        (True, [a, b, c], [3, 5, 2]),  # nothing could decode yet
        (False, [a, b], [1, 1]),
        (True, [c], [6]),
        (False, [a, b], [1, 1]),
        (True, [c], [1]),
        (False, [a, b, c], [1, 1, 1]),
    ]


def test_shortest_output_is_preempted_first_and_waits_in_order_of_arrival() -> None:
    scheduler = make_scheduler(9, watermark=0.0)  # 8 blocks
    old = add(scheduler, 0, 4)
    step(scheduler)
    step(scheduler)
    middle, new = add(scheduler, 1, 8), add(scheduler, 2, 8)
    late = add(scheduler, 3, 4)
    while not new.metrics.num_preemptions:
        step(scheduler)
    assert scheduler.running[0] is old and middle in scheduler.running
    assert list(scheduler.waiting) == [new, late] and late.metrics.num_preemptions > 0
    assert (new.num_computed, new.state_slot, len(new.block_table), new.metrics.num_preemptions) == (0, 0, 0, 1)
    assert new.num_output_tokens > 0  # its tokens are kept


def test_a_running_sequence_may_give_way_to_one_being_recomputed() -> None:
    """The only running sequence has the shortest output: the step becomes a prefill, not an empty decode."""
    scheduler = make_scheduler(6, watermark=0.0, prefill_chunk_size=4)  # 5 blocks
    recomputed = add(scheduler, 0, 4)
    recomputed.token_ids.extend([1] * 9)  # 9 output tokens, preempted earlier
    short = add(scheduler, 1, 4)
    assert step(scheduler).num_tokens == [4, 4]  # 4 blocks and 1 block; short is prompted with one token
    batch = step(scheduler)
    assert (batch.is_prefill, batch.sequences) == (True, [recomputed])
    assert list(scheduler.waiting) == [short] and short.metrics.num_preemptions == 1
