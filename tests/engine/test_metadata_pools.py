"""Rows that are kept from step to step say what the sequences say, and a read that comes too late is caught."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.block_manager import BlockManager
from deepinfer.engine.engine import Engine
from deepinfer.engine.mtp_info import MTPInfoPool
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.sequence_metadata import SequenceMetadataPool
from deepinfer.engine.state_slots import NULL_SLOT, StateSlots
from deepinfer.observability.memory import StaleReadError
from deepinfer.outputs import RequestMetrics
from deepinfer.params import SamplingParams
from deepinfer.sampling.sampler import pack_parameters
from tests.engine.toy_model import ToyRunner

VOCAB_SIZE = 50
NUM_SLOTS = 4
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=5, seed=3),
    SamplingParams(temperature=1.5, min_p=0.1, force_topk=7, seed=4),
    SamplingParams(golden_token_ids=[9, 8, 7]),
]


def new_sequence(number: int, kind: int = 1, prompt: tuple[int, ...] = (5, 6)) -> Sequence:
    return Sequence("r", 0, number, prompt, PARAMS[kind], 2**63 + number, RequestMetrics(0.0))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_are_those_of_the_sequences_whatever_held_their_slots_before(data: st.DataObject) -> None:
    """Sequences come, grow, lose their blocks and come back, into the same slot or another one."""
    blocks, slots = BlockManager(40, 2), StateSlots(NUM_SLOTS)
    pool = SequenceMetadataPool(NUM_SLOTS + 1, VOCAB_SIZE, debug=True)
    sequences = [new_sequence(number, number % len(PARAMS)) for number in range(6)]
    for _ in range(data.draw(st.integers(1, 12))):
        pool.next_round()
        seq = data.draw(st.sampled_from(sequences))
        if seq.state_slot != NULL_SLOT and data.draw(st.booleans()):
            blocks.release(seq.block_table)
            slots.free(seq.state_slot)
            seq.state_slot = NULL_SLOT
        elif seq.state_slot != NULL_SLOT or slots.num_free:
            if seq.state_slot == NULL_SLOT:
                seq.state_slot, seq.block_table = slots.allocate(), array("i")
            if data.draw(st.booleans()):
                seq.append(data.draw(st.integers(0, VOCAB_SIZE - 1)), set())
            more = data.draw(st.integers(0, 6))
            blocks.extend(seq.block_table, min(2 * (len(seq.block_table) + more), 12))
        batch = data.draw(st.permutations([s for s in sequences if s.state_slot != NULL_SLOT and s.block_table]))
        if not batch:
            continue
        taken = pool.take(batch)
        assert taken.tolist() == [s.state_slot for s in batch]
        longest = max(len(s.block_table) for s in batch)
        assert pool.longest_table(taken) == longest
        target = np.full((len(batch) + 2, longest + data.draw(st.integers(0, 9))), -7, np.int32)
        pool.write_block_tables(taken, target)
        tables = [[*s.block_table, *[0] * (target.shape[1] - len(s.block_table))] for s in batch]
        assert target.tolist() == tables + [[0] * target.shape[1]] * 2
        counters = np.array([s.num_output_tokens for s in batch])
        assert np.array_equal(pool.parameters(taken, counters, batch), pack_parameters(batch, VOCAB_SIZE))


def test_rows_stay_for_one_extra_round_and_a_stale_read_is_caught() -> None:
    pool = SequenceMetadataPool(NUM_SLOTS + 1, VOCAB_SIZE, debug=True)
    seq = new_sequence(0)
    seq.state_slot = 2
    seq.block_table.extend([3, 4])
    pool.next_round()
    slots = pool.take([seq])
    del seq.block_table[:]  # it has ended
    pool.next_round()
    counters = np.array([0])
    assert np.array_equal(pool.parameters(slots, counters), pack_parameters([seq], VOCAB_SIZE))  # the extra round
    pool.next_round()
    with pytest.raises(StaleReadError, match="after its round"):
        pool.parameters(slots, counters)
    with pytest.raises(StaleReadError):
        pool.write_block_tables(slots, np.zeros((1, 2), np.int32))


def test_an_engine_that_checks_finds_a_step_with_old_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: a step whose rows were not taken for it fails, and says why."""
    monkeypatch.setenv("DEEPINFER_CHECK_INTEGRITY", "1")
    config = EngineConfig(block_size=8, num_blocks=20, max_num_seqs=4)
    engine = Engine(ToyRunner(20, 8, 4), config)
    engine.add_request("a", [1, 2], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    engine.step()
    kept = engine.metadata.take(engine.scheduler.prompted)
    monkeypatch.setattr(engine.metadata, "take", lambda sequences: kept)
    errors = [output.error for _ in range(4) for output in engine.step()]
    assert any(error is not None and error.startswith("StaleReadError") for error in errors)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_rows_of_drafts_are_sequences_with_the_drafts_behind_them(
    drafted: list[tuple[int, list[int]]], grown: int
) -> None:
    pool = MTPInfoPool(NUM_SLOTS + 1, 3)
    sequences = [new_sequence(number, number % len(PARAMS)) for number in range(len(drafted))]
    for round_number in range(2):  # the second one uses the rows again
        for seq, (_, drafts) in zip(sequences, drafted, strict=True):
            seq.next_drafts = [token + round_number for token in drafts]
        counts = [count for count, _ in drafted]
        rows = pool.rows(sequences, range(1, len(drafted) + 1), counts)
        assert len(rows) == sum(counts) + len(counts)
        rest = iter(rows)
        for seq, count in zip(sequences, counts, strict=True):
            for position in range(count + 1):
                row = next(rest)
                text = [*seq.token_ids, *seq.next_drafts[: min(position, count)]]
                assert row.token_ids.tolist() == text
                assert row.num_output_tokens == seq.num_output_tokens + position
                assert (row.params, row.seed, row.num_prompt_tokens) == (seq.params, seq.seed, 2)
                assert list(row.drafts) == ([] if position else seq.next_drafts[:count])
                assert (row is seq) == (count == 0)
        for seq in sequences:
            for token in range(grown):
                seq.append(token, set())


def test_rows_belong_to_the_sequence_that_holds_the_slot_now() -> None:
    pool = MTPInfoPool(NUM_SLOTS + 1, 2)
    first, second = new_sequence(0), new_sequence(1, kind=2, prompt=(1, 2, 3))
    old = pool.rows([first], [1], [2])
    rows = pool.rows([second], [1], [1])
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3]] * 2
    assert [row.params for row in rows] == [PARAMS[2]] * 2 and not set(map(id, old)) & set(map(id, rows))


def test_a_row_of_drafts_that_is_read_after_its_round_is_caught() -> None:
    pool = MTPInfoPool(NUM_SLOTS + 1, 2)
    seq = new_sequence(0)
    rows = pool.rows([seq], [1], [2])
    assert rows[2].token_ids.tolist() == [5, 6]  # no draft is known yet
    seq.append(7, set())
    with pytest.raises(StaleReadError, match="after its round"):
        rows[0].token_ids  # noqa: B018
    assert pool.rows([seq], [1], [2])[0].token_ids.tolist() == [5, 6, 7]


def test_steady_rounds_make_no_new_rows() -> None:
    pool = MTPInfoPool(NUM_SLOTS + 1, 2)
    sequences = [new_sequence(0), new_sequence(1)]
    made = set()
    kept = []
    for token in range(20):
        rows = pool.rows(sequences, [1, 2], [2, 1])
        kept += rows
        made |= set(map(id, rows))
        for seq in sequences:
            seq.append(token, set())
    assert len(made) == 5
