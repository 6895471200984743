"""Swapping to the host: bytes come back, books balance, and tokens are those of a run without preemption."""

from __future__ import annotations

from array import array
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from torch import Tensor

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.runner import ModelRunner
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.swap import STAGED_BLOCKS, CacheRows, HostSwap, copy_sequence
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.random_weights import random_weights
from deepinfer.outputs import RequestMetrics, RequestOutput
from deepinfer.params import SamplingParams
from tests.configs import tiny_config, tiny_token_map
from tests.engine.test_engine_workloads import EngineMachine, Expected, assert_idle, make_engine, record
from tests.engine.toy_model import VOCAB_SIZE, greedy_oracle

PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=40)
BLOCK_SIZE = 4
POOL_BYTES = 1 << 13


def make_sequence(num_computed: int, block_table: list[int], slot: int) -> Sequence:
    seq = Sequence("r", 0, 0, [1] * num_computed, PARAMS, 0, RequestMetrics(0.0))
    seq.num_computed, seq.block_table, seq.state_slot = num_computed, array("i", block_table), slot
    return seq


def random_rows(num_blocks: int, num_slots: int, block_widths: list[int], slot_widths: list[int]) -> CacheRows:
    generator = torch.Generator().manual_seed(0)

    def fill(rows: int, widths: list[int]) -> list[Tensor]:
        return [torch.randint(256, (rows, w), dtype=torch.uint8, generator=generator) for w in widths]

    return CacheRows(fill(num_blocks, block_widths), fill(num_slots, slot_widths))


@settings(max_examples=60, deadline=None)
@given(
    block_widths=st.lists(st.integers(1, 40), max_size=4),
    slot_widths=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    num_computed=st.integers(1, 30),
    spare_block=st.booleans(),
    data=st.data(),
)
def test_a_sequence_comes_back_into_other_blocks_byte_for_byte(
    block_widths: list[int], slot_widths: list[int], num_computed: int, spare_block: bool, data: st.DataObject
) -> None:
    rows = random_rows(24, 5, block_widths, slot_widths)
    swap = HostSwap(rows, BLOCK_SIZE, 1 << 16)
    needed = -(-num_computed // BLOCK_SIZE)
    held = needed + spare_block  # one for the next token has no content yet
    before = data.draw(st.permutations(range(1, 24)))[:held]
    after = data.draw(st.permutations(range(1, 24)))[:held]
    want_blocks = [tensor[before[:needed]].clone() for tensor in rows.blocks]
    want_slots = [tensor[2].clone() for tensor in rows.slots]
    seq = make_sequence(num_computed, before, slot=2)
    assert swap.swap_out(seq)
    swap.check_integrity([seq])
    for tensor in (*rows.blocks, *rows.slots):
        tensor.fill_(255)  # whoever has the blocks now
    seq.block_table, seq.state_slot = array("i", after), 3
    swap.swap_in(seq)
    assert not seq.host_blocks and swap.blocks.num_free == swap.blocks.num_blocks - 1
    swap.check_integrity([seq])
    for tensor, want in zip(rows.blocks, want_blocks, strict=True):
        assert torch.equal(tensor[after[:needed]], want)
        others = [block for block in range(24) if block not in after[:needed]]
        assert (tensor[others] == 255).all()
    for tensor, state in zip(rows.slots, want_slots, strict=True):
        assert torch.equal(tensor[3], state) and (tensor[[0, 1, 2, 4]] == 255).all()


def test_a_long_sequence_is_moved_part_by_part() -> None:
    """More blocks than are staged at once, out and in, and from one engine's caches to another's."""
    num_blocks = 2 * STAGED_BLOCKS + 3
    rows, target = random_rows(2 * num_blocks + 1, 3, [5, 8], [7]), random_rows(num_blocks + 1, 2, [5, 8], [7])
    order = (torch.randperm(2 * num_blocks, generator=torch.Generator().manual_seed(2)) + 1).tolist()
    before, after = order[:num_blocks], order[num_blocks:]
    want = [tensor[before].clone() for tensor in rows.blocks]
    there = list(range(num_blocks, 0, -1))
    copy_sequence(rows, before, 1, target, there, 1)
    swap, seq = HostSwap(rows, BLOCK_SIZE, 13 * (num_blocks + 1)), make_sequence(BLOCK_SIZE * num_blocks, before, 1)
    assert swap.swap_out(seq)
    seq.block_table = array("i", after)
    swap.swap_in(seq)
    for moved, copied, expected in zip(rows.blocks, target.blocks, want, strict=True):
        assert torch.equal(moved[after], expected) and torch.equal(copied[there], expected)


@pytest.mark.gpu
def test_on_a_gpu_copies_keep_their_place_among_the_steps() -> None:
    """Nothing waits for the device: blocks are written over, and host rows used again, while copies are under way."""
    rows = random_rows(600, 4, [50_000, 6_960], [1_000_000])
    rows = CacheRows([tensor.cuda() for tensor in rows.blocks], [tensor.cuda() for tensor in rows.slots])
    want, want_slot = [tensor.clone() for tensor in rows.blocks], rows.slots[0].clone()
    swap = HostSwap(rows, BLOCK_SIZE, 60_000 * 400)
    blocks = torch.randperm(599, generator=torch.Generator().manual_seed(1)).add(1).tolist()
    first, second = (
        make_sequence(BLOCK_SIZE * 300, blocks[:300], 1),
        make_sequence(BLOCK_SIZE * 200, blocks[300:500], 2),
    )
    assert swap.swap_out(first)
    for tensor in (*rows.blocks, *rows.slots):
        tensor[blocks[:300] if len(tensor) == 600 else 1] = 7  # the next step writes to them
    first.block_table, first.state_slot = array("i", blocks[299::-1]), 3
    swap.swap_in(first)
    assert swap.swap_out(second)  # into the rows that have just been read
    for tensor in rows.blocks:
        tensor[blocks[300:500]] = 9
    swap.swap_in(second)
    for tensor, whole in zip(rows.blocks, want, strict=True):
        assert torch.equal(tensor[blocks[299::-1]], whole[blocks[:300]])
        assert torch.equal(tensor[blocks[300:500]], whole[blocks[300:500]])
    assert torch.equal(rows.slots[0][3], want_slot[1]) and torch.equal(rows.slots[0][2], want_slot[2])


def test_a_full_pool_takes_nothing() -> None:
    rows = random_rows(24, 3, [16], [16])
    swap = HostSwap(rows, BLOCK_SIZE, 6 * 16)  # three blocks and their state, and one row too few for the next
    first, second = make_sequence(12, [1, 2, 3], 1), make_sequence(5, [4, 5], 2)
    assert swap.swap_out(first) and not swap.swap_out(second)
    assert not second.host_blocks and swap.blocks.num_free == 2
    swap.drop(first)
    assert swap.swap_out(second)
    assert not swap.swap_out(make_sequence(0, [], 1)), "there is nothing to keep"


def test_a_pool_that_holds_no_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="swap_memory_bytes must be at least 32, which one sequence takes, got 31"):
        HostSwap(random_rows(4, 3, [16], [16]), BLOCK_SIZE, 31)


def test_a_pool_beyond_any_host_is_refused() -> None:
    with pytest.raises(ValueError, match="swap_memory_bytes is .*, which this host cannot give"):
        HostSwap(random_rows(4, 3, [1 << 20], [1 << 20]), BLOCK_SIZE, 1 << 60)


def test_leaked_rows_are_found() -> None:
    swap = HostSwap(random_rows(24, 3, [16], [16]), BLOCK_SIZE, 1 << 12)
    seq = make_sequence(8, [1, 2], 1)
    swap.swap_out(seq)
    with pytest.raises(RuntimeError, match="reference counts"):
        swap.check_integrity([])
    seq.num_computed = 4
    with pytest.raises(RuntimeError, match="does not hold what its tokens take"):
        swap.check_integrity([seq])


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, RequestOutput]:
    got: dict[str, RequestOutput] = {}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params[number % len(params)])
    steps = 0
    while engine.has_unfinished_requests():
        record(got, engine.step())
        engine.scheduler.check_integrity()
        steps += 1
        assert steps < 20_000, "the engine spins"
    return got


@settings(max_examples=50, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40), min_size=2, max_size=8),
    num_blocks=st.integers(22, 40),  # the longest sequence takes 20
    overlap=st.booleans(),
    pool_rows=st.integers(2, 60),  # from nothing but short sequences to all of them
    chunk=st.sampled_from([3, 16, 64]),
)
def test_tokens_are_the_oracles_whatever_the_pool_holds(
    prompts: list[list[int]], num_blocks: int, overlap: bool, pool_rows: int, chunk: int
) -> None:
    engine = make_engine(
        BLOCK_SIZE, num_blocks, 6, chunk, 64,
        preemption_mode="swap", swap_memory_bytes=pool_rows * BLOCK_SIZE * 8, zero_overhead_scheduling=overlap,
    )  # fmt: skip
    for request_id, output in run(engine, prompts, [PARAMS]).items():
        want, _, _ = greedy_oracle(prompts[int(request_id)], PARAMS, set(), engine.max_model_len)
        assert output.outputs[0].token_ids == want
    assert_idle(engine)
    assert engine.scheduler.swap is not None and engine.scheduler.swap.blocks.num_free == pool_rows


@pytest.mark.parametrize("overlap", [False, True])
def test_a_swapped_sequence_is_not_computed_again(overlap: bool) -> None:
    """As many prompt tokens run as there are, although sequences are preempted."""
    prompts = [[number + 1] * 20 for number in range(4)]
    steps = {}
    for mode in ("recompute", "swap"):
        engine = make_engine(
            BLOCK_SIZE, 32, 4, 64, 64, preemption_mode=mode, swap_memory_bytes=POOL_BYTES, watermark=0.0,
            zero_overhead_scheduling=overlap,
        )  # fmt: skip
        run(engine, prompts, [PARAMS])
        assert engine.stats().num_preemptions > 0
        steps[mode] = sum(tokens for is_prefill, tokens in engine.runner.steps if is_prefill)  # type: ignore[attr-defined]
    assert steps["swap"] == 4 * 20 < steps["recompute"]


def test_aborting_a_swapped_request_frees_its_host_rows() -> None:
    engine = make_engine(BLOCK_SIZE, 32, 4, 64, 64, preemption_mode="swap", swap_memory_bytes=POOL_BYTES, watermark=0.0)
    for number in range(4):
        engine.add_request(str(number), [number + 1] * 20, PARAMS)
    swap = engine.scheduler.swap
    assert swap is not None
    while not engine.stats().num_preemptions:
        engine.step()
    swapped = engine.scheduler.waiting[0]
    assert swapped.host_blocks and swap.blocks.num_free < swap.blocks.num_blocks - 1
    engine.abort_request(swapped.request_id)
    assert swap.blocks.num_free == swap.blocks.num_blocks - 1
    engine.scheduler.check_integrity()


CONFIG = tiny_config(max_position_embeddings=4096)


@cache
def v41() -> DeepseekV41:
    weights = {name: w.double() for name, w in random_weights(CONFIG, seed=0).items()}
    return DeepseekV41(CONFIG, weights, torch.from_numpy(tiny_token_map()).long())


@pytest.mark.parametrize(
    ("kv_cache_dtype", "overlap", "graphs"), [("fp64", True, False), ("fp8", False, False), ("fp8", True, True)]
)
def test_the_real_model_with_swapping_equals_itself_without_preemption(
    kv_cache_dtype: str, overlap: bool, graphs: bool
) -> None:
    """Both preemption modes, sampled and greedy requests, with a cache for about two of four sequences."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 500, (n,), generator=generator).tolist() for n in (30, 7, 51, 18)]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True)
    results = []
    for num_blocks, mode in ((100, "recompute"), (24, "recompute"), (24, "swap")):
        config = EngineConfig(
            block_size=BLOCK_SIZE, num_blocks=num_blocks, max_num_seqs=4, dtype="fp64", prefill_chunk_size=16,
            kv_cache_dtype=kv_cache_dtype, preemption_mode=mode, swap_memory_bytes=1 << 22, watermark=0.0,
            zero_overhead_scheduling=overlap, cuda_graphs=graphs,
        )  # fmt: skip
        engine = Engine(ModelRunner(v41(), config), config)
        got = run(engine, prompts, [greedy, sampled, greedy, sampled])
        results.append({request_id: output.outputs[0].token_ids for request_id, output in got.items()})
        assert (engine.stats().num_preemptions > 0) == (num_blocks == 24)
        assert (engine.scheduler.swap is not None and engine.scheduler.swap.num_swapped_out > 0) == (mode == "swap")
    assert results[0] == results[1] == results[2]


class SwappingMachine(EngineMachine):
    """The workloads of test_engine_workloads.py, with swapping, overlap and pools of any size."""

    @initialize(
        block_size=st.sampled_from([3, 8]),
        num_blocks=st.integers(12, 40),
        max_num_seqs=st.integers(1, 6),
        chunk=st.sampled_from([2, 7, 64]),
        step_tokens=st.integers(4, 200),
        overlap=st.booleans(),
        pool_rows=st.integers(4, 40),
        kind=st.sampled_from(["normal", "completion"]),
    )
    def start(self, overlap: bool, pool_rows: int, block_size: int, **sizes: Any) -> None:
        self.engine = make_engine(
            block_size=block_size, preemption_mode="swap", swap_memory_bytes=pool_rows * block_size * 8,
            zero_overhead_scheduling=overlap, **sizes,
        )  # fmt: skip
        self.expected: dict[str, Expected] = {}
        self.got: dict[str, RequestOutput] = {}


TestSwappingMachine = SwappingMachine.TestCase
TestSwappingMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
