"""A decode step of fixed shape: the same plan as the general one, no look at values, padding that harms nobody."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from deepinfer.config.model import engram_primes
from deepinfer.engine.step_buffers import StepBuffers, StepShape, first_rows, pad_inputs
from deepinfer.kernels.registry import OPERATIONS
from deepinfer.models.caches import carry_size, history_size
from deepinfer.models.inputs import HostLengths, ModelInputs
from deepinfer.models.layers.decode_step import decode_metadata
from deepinfer.models.layers.rope import rope_frequencies
from deepinfer.models.layers.step import Rotation, StepMetadata
from deepinfer.models.layers.yoco import decoder_half
from tests.configs import tiny_config
from tests.models.test_deepseek_v41 import BLOCK_SIZE, Driver, make_model


def decode_inputs(positions: list[int], seed: int) -> ModelInputs:
    """A decode step of sequences at these positions, with shuffled blocks and slots."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(positions)
    blocks = max(positions) // BLOCK_SIZE + 1
    tables = (torch.randperm(num_rows * blocks, generator=generator) + 1).int().view(num_rows, blocks)
    at = torch.tensor(positions)
    return ModelInputs(
        is_prefill=False,
        token_ids=torch.randint(3, 500, (num_rows,), generator=generator),
        positions=at,
        query_start=torch.arange(num_rows + 1, dtype=torch.int32),
        context_lens=(at + 1).int(),
        block_tables=tables,
        state_slots=(torch.randperm(num_rows, generator=generator) + 1).int(),
        logits_rows=torch.arange(num_rows),
    )


def rows_of_sequences(inputs: ModelInputs, owner: list[int], positions: list[int]) -> ModelInputs:
    """A step of several rows a sequence: row i belongs to the sequence owner[i] of `inputs`."""
    index, at = torch.tensor(owner), torch.tensor(positions)
    return replace(
        inputs,
        token_ids=torch.arange(len(owner)) + 3,
        positions=at,
        query_start=torch.arange(len(owner) + 1, dtype=torch.int32),
        context_lens=(at + 1).int(),
        block_tables=inputs.block_tables[index],
        state_slots=inputs.state_slots[index],
        logits_rows=torch.arange(len(owner)),
    )


def fields_of(plan: object) -> list[torch.Tensor]:
    return [getattr(plan, field.name) for field in fields(plan)]  # type: ignore[arg-type]


def same(got: object, expected: object) -> None:
    """Tensors, also of rotations: the same values and dtypes."""
    for field in fields(expected):  # type: ignore[arg-type]
        mine, theirs = getattr(got, field.name), getattr(expected, field.name)
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), field.name


@settings(deadline=None)
@given(
    starts=st.lists(st.tuples(st.integers(0, 100), st.sampled_from([1, 1, 2, 6])), min_size=1, max_size=8),
    ngram=st.integers(2, 4),
    ring_size=st.integers(16, 30),
    seed=st.integers(0, 1000),
)
def test_a_decode_plan_does_what_the_general_plan_does(
    starts: list[tuple[int, int]], ngram: int, ring_size: int, seed: int
) -> None:
    """The oracle is the general plan of a prefill of these few tokens each; only the window is read elsewhere."""
    tables = tuple(map(sum, engram_primes(2, (ngram - 1) * 2, 61)))
    config = tiny_config(engram_max_ngram_size=ngram, engram_num_embeddings=tables)
    frequencies = {kind: rope_frequencies(config, kind) for kind in (False, True)}
    counts = [count for _, count in starts]
    owner = [i for i, count in enumerate(counts) for _ in range(count)]
    positions = [start + j for start, count in starts for j in range(count)]
    one_each = decode_inputs([start + count - 1 for start, count in starts], seed)
    inputs = rows_of_sequences(one_each, owner, positions)
    query_start = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    prefill = replace(
        one_each, is_prefill=True, token_ids=inputs.token_ids, positions=inputs.positions, query_start=query_start
    )
    arguments = (config, frequencies, BLOCK_SIZE, torch.float32, ring_size)
    general = StepMetadata.build(prefill, *arguments)
    decode = decode_metadata(inputs, *arguments)

    num_rows, carry = len(positions), carry_size(2, ring_size - config.sliding_window)
    num_history = history_size(ngram, ring_size - config.sliding_window)
    assert torch.equal(decode.sequence_of_row, torch.arange(num_rows, dtype=torch.int32))
    assert torch.equal(decode.state_slots, general.state_slots[owner]) and decode.state_slots.dtype == torch.int64
    for kind in (False, True):
        same(decode.rotations[kind], general.rotations[kind])

    def of_rows(index: torch.Tensor, size: int) -> torch.Tensor:
        """What says the same in a plan whose kept rows are one set a sequence, not one a row."""
        kept, sequence = index - num_rows, torch.tensor([*owner, len(starts)])
        return torch.where(index < num_rows, index, num_rows + sequence[kept // size] * size + kept % size)

    assert torch.equal(of_rows(decode.ngram_source, num_history), general.ngram_source)
    assert decode.history.rows is None
    for row, slot, place in zip(*(t.tolist() for t in fields_of(general.history)), strict=True):
        assert (slot, place) == (int(decode.history.slots[row]), int(decode.history.places[row]))

    # Stored first, then read from the ring: position p lies at p % ring.
    assert decode.window.from_ring and torch.equal(decode.window.stored_slots, general.window.stored_slots)
    for row, position in enumerate(positions):
        base = ring_size * int(inputs.state_slots[row])
        expected = [base + p % ring_size if p >= 0 else -1 for p in range(position - 15, position + 1)]
        assert decode.window.slots[row].tolist() == expected

    at = inputs.positions
    for ratio, plan in general.compression.items():
        got, is_complete = decode.compression[ratio], at % ratio == ratio - 1
        assert torch.equal(got.visible, plan.visible) and got.visible.dtype == plan.visible.dtype
        assert torch.equal(got.members[is_complete, -1:], plan.members[:, -1:])
        if ratio > 1:  # ratio 1 pools nothing and carries nothing
            assert torch.equal(of_rows(got.members[is_complete], carry), plan.members)
            kept = torch.isin(got.pending_rows, plan.pending_rows)  # every open group is carried, not the last alone
            assert not (kept & is_complete).any()
            for name in ("pending_rows", "pending_slots", "pending_places"):
                assert torch.equal(getattr(got, name)[kept], getattr(plan, name)), name
            assert torch.equal(got.pending_slots[~is_complete], decode.state_slots[~is_complete])
            assert torch.equal(got.pending_places, at % carry)
            assert (got.pending_slots[is_complete] == 0).all()
        assert torch.equal(got.group_slots[is_complete].long(), plan.group_slots)
        same(Rotation(got.rotation.cos[is_complete], got.rotation.sin[is_complete]), plan.rotation)
        # What is left over reads rows that exist and writes the null block.
        assert got.members.min() >= 0 and got.members.max() < num_rows * (1 + carry)
        assert (got.group_slots[~is_complete] < BLOCK_SIZE // ratio).all()


@pytest.mark.parametrize("rows", [1, 5])
def test_no_shape_depends_on_values(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: an operation that asks for one raises."""
    monkeypatch.delitem(OPERATIONS["decode_plan"].backends, "cpu", raising=False)  # C reads memory, and they have none
    config, _, model = make_model(torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = decode_inputs([17] * rows, 0)
        tensors = {f.name: v for f in fields(inputs) if isinstance(v := getattr(inputs, f.name), torch.Tensor)}
        fake = replace(inputs, **{name: mode.from_tensor(tensor) for name, tensor in tensors.items()})
        step = decode_metadata(fake, config, model.frequencies, BLOCK_SIZE, torch.float32)
        assert step.window.slots.shape == (rows, config.sliding_window)


def test_a_prefill_step_with_the_hosts_lengths_asks_the_device_nothing() -> None:
    config, _, model = make_model(torch.float32)
    starts, counts, keep = np.array([0, 7, 30]), np.array([9, 1, 20]), np.array([4, 10, 33])
    inputs = ModelInputs(
        True,
        torch.zeros(30, dtype=torch.int64),
        torch.from_numpy(np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])),
        torch.from_numpy(np.array([0, *counts.cumsum()], np.int32)),
        torch.from_numpy((starts + counts).astype(np.int32)),
        torch.arange(1, 22, dtype=torch.int32).view(3, 7),
        torch.tensor([3, 1, 2], dtype=torch.int32),
        torch.tensor([29]),
        keep_from=torch.from_numpy(keep.astype(np.int32)),
        drop_rows=True,
    )
    lengths = HostLengths(starts, counts, np.array([5, 0, 17]))
    arguments = (config, model.frequencies, BLOCK_SIZE, torch.float32)
    read = StepMetadata.build(inputs, *arguments)
    told = StepMetadata.build(replace(inputs, lengths=lengths), *arguments)
    same_everywhere(told, read)
    same_everywhere(decoder_half(told, config), decoder_half(read, config))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensors = {f.name: v for f in fields(inputs) if isinstance(v := getattr(inputs, f.name), torch.Tensor)}
        fake = replace(inputs, **{name: mode.from_tensor(tensor) for name, tensor in tensors.items()})
        decoder_half(StepMetadata.build(replace(fake, lengths=lengths), *arguments), config)
        with pytest.raises((RuntimeError, NotImplementedError)):
            StepMetadata.build(fake, *arguments)


def same_everywhere(got: object, expected: object) -> None:
    """The same tensors in the whole tree of dataclasses and dictionaries."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor) and torch.equal(got, expected)
    elif isinstance(expected, dict):
        for key in expected:
            same_everywhere(got[key], expected[key])  # type: ignore[index]
    elif isinstance(expected, HostLengths):
        for field in fields(expected):
            assert np.array_equal(getattr(got, field.name), getattr(expected, field.name))
    elif is_dataclass(expected):
        for field in fields(expected):
            if field.name != "lengths" or getattr(expected, field.name) is not None:
                same_everywhere(getattr(got, field.name), getattr(expected, field.name))
    else:
        assert got == expected


def padded_copy(inputs: ModelInputs, shape: StepShape) -> ModelInputs:
    padded = StepBuffers(shape, "cpu").inputs(shape)
    for part in (padded.token_ids, padded.positions, padded.context_lens, padded.state_slots, padded.block_tables):
        part.fill_(3)  # what an earlier step left there
    pad_inputs(inputs, padded)
    return padded


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=7),
    num_real=st.integers(1, 6),
    more_blocks=st.integers(0, 9),
    seed=st.integers(0, 1000),
)
@pytest.mark.parametrize("cache_dtype", ["fp32", "fp8"])
def test_padding_rows_change_no_bit_of_the_others(
    cache_dtype: str, lengths: list[int], num_real: int, more_blocks: int, seed: int
) -> None:
    """The same rows beside other sequences and beside padding: matrix products of one shape round in one way.

    Caches too: every row but those of the null block, the null slot and the sequences that are left out.
    """
    config, _, model = make_model(torch.float32)
    num_real = min(num_real, len(lengths) - 1)
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(3, config.vocab_size - 2, (n + 3,), generator=generator) for n in lengths]
    driver = Driver(model, cache_dtype, [n + 3 for n in lengths], seed)
    driver.step(sequences, dict(enumerate(lengths)), True)
    other = copy.deepcopy(driver.caches)
    slots = driver.slots[:num_real].long()
    blocks = driver.tables[:num_real].unique()
    blocks = blocks[blocks > 0].long()
    for _ in range(3):
        inputs = driver.inputs(sequences, dict.fromkeys(range(len(lengths)), 1), False)
        shape = StepShape(len(lengths), inputs.block_tables.shape[1] + more_blocks)
        beside_others = model.forward(inputs, driver.caches)
        beside_padding = model.forward(padded_copy(first_rows(inputs, num_real), shape), other)
        assert torch.equal(beside_padding[:num_real], beside_others[:num_real])
        assert torch.isfinite(beside_padding).all()
        assert torch.equal(driver.caches.state.storage[slots], other.state.storage[slots])
        for mine, theirs in (
            (driver.caches.blocks.latents, other.blocks.latents),
            (driver.caches.blocks.index_keys, other.blocks.index_keys),
        ):
            for layer in mine:
                assert torch.equal(mine[layer][blocks].view(torch.uint8), theirs[layer][blocks].view(torch.uint8))


@pytest.mark.parametrize("lengths", [[1], [5, 40, 17], [8, 7, 6, 30, 31]])
def test_padded_logits_are_those_of_the_step_alone(lengths: list[int]) -> None:
    config, _, model = make_model(torch.float64)
    sequences = [torch.arange(3, n + 9) % config.vocab_size for n in lengths]
    driver = Driver(model, "fp64", [n + 6 for n in lengths], 1)
    driver.step(sequences, dict(enumerate(lengths)), True)
    other = copy.deepcopy(driver.caches)
    for _ in range(6):
        inputs = driver.inputs(sequences, dict.fromkeys(range(len(lengths)), 1), False)
        padded = padded_copy(inputs, StepShape(8, inputs.block_tables.shape[1] + 3))
        alone = model.forward(inputs, driver.caches)
        torch.testing.assert_close(model.forward(padded, other)[: len(lengths)], alone, rtol=0, atol=1e-11)
