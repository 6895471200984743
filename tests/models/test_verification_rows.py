"""Several rows of a sequence in one decode step, some of them taken back, against the reference computed in full."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.config.model import engram_primes
from deepinfer.engine.step_buffers import StepBuffers, StepShape, pad_inputs
from deepinfer.models import reference
from deepinfer.models.inputs import ModelInputs
from tests.models.test_deepseek_v41 import TOKEN_MAP, Driver, make_model

WRONG = 7  # what drafts that are taken back hold; the true tokens never do


def verification_step(
    driver: Driver, sequences: list[torch.Tensor], right: dict[int, int], wrong: dict[int, int]
) -> ModelInputs:
    """For each sequence its next token, right[i] drafts that are its true tokens and wrong[i] that are not."""
    owner, positions, ids = [], [], []
    for i in right:
        start, count = driver.computed[i], 1 + right[i]
        owner += [i] * (count + wrong[i])
        positions += range(start, start + count + wrong[i])
        ids += [*sequences[i][start : start + count].tolist(), *[WRONG] * wrong[i]]
    rows, at = torch.tensor(owner), torch.tensor(positions)
    return ModelInputs(
        is_prefill=False,
        token_ids=torch.tensor(ids),
        positions=at,
        query_start=torch.arange(len(ids) + 1, dtype=torch.int32),
        context_lens=(at + 1).int(),
        block_tables=driver.tables[rows],
        state_slots=driver.slots[rows],
        logits_rows=torch.arange(len(ids)),
    )


def run_and_compare(
    config, weights, model, cache_dtype: str, lengths: list[int], seed: int, padded: bool, room: int = 4
) -> None:
    """`room` rows of a sequence in a step at most: what the state has room to take back."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sequences = [torch.randint(8, config.vocab_size - 2, (n,), generator=generator) for n in lengths]
    numerics = reference.Numerics(quantize_kv=cache_dtype == "fp8")
    expected = [reference.forward(weights, config, s[None], TOKEN_MAP, numerics=numerics)[0] for s in sequences]
    driver = Driver(model, cache_dtype, [n + room for n in lengths], seed, room)
    driver.step(sequences, {i: rng.randint(1, n) for i, n in enumerate(lengths)}, True)
    while running := [i for i, n in enumerate(lengths) if driver.computed[i] < n]:
        running = rng.sample(running, rng.randint(1, len(running)))
        right = {i: min(rng.randrange(room), lengths[i] - driver.computed[i] - 1) for i in running}
        wrong = {i: rng.randrange(room - right[i]) for i in running}
        inputs = verification_step(driver, sequences, right, wrong)
        if padded:
            shape = StepShape(len(inputs.token_ids) + 3, inputs.block_tables.shape[1] + 2)
            stable = StepBuffers(shape, "cpu").inputs(shape)
            pad_inputs(inputs, stable)
            inputs = stable
        logits, row = model.forward(inputs, driver.caches), 0
        for i in running:
            start = driver.computed[i]
            got, wanted = logits[row : row + 1 + right[i]], expected[i][start : start + 1 + right[i]]
            error = (got - wanted).abs().max() / expected[i].abs().max()
            assert error < 1e-9, f"sequence {i} at {start}: relative error {error:.2e}"
            row += 1 + right[i] + wrong[i]
            driver.computed[i] += 1 + rng.randint(0, right[i])  # of the right ones, any number may be kept


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(2, 70), min_size=1, max_size=4), seed=st.integers(0, 10_000), padded=st.booleans())
@pytest.mark.parametrize("cache_dtype", ["fp64", "fp8"])
def test_rows_that_are_taken_back_leave_no_trace(cache_dtype: str, lengths: list[int], seed: int, padded: bool) -> None:
    config, weights, model = make_model(torch.float64)
    run_and_compare(config, weights, model, cache_dtype, lengths, seed, padded)


@settings(max_examples=8, deadline=None)
@given(room=st.integers(1, 8), ngram=st.integers(2, 4), seed=st.integers(0, 1000))
def test_other_numbers_of_drafts_and_longer_ngrams(room: int, ngram: int, seed: int) -> None:
    tables = tuple(map(sum, engram_primes(2, (ngram - 1) * 2, 61)))
    config, weights, model = make_model(torch.float64, engram_max_ngram_size=ngram, engram_num_embeddings=tables)
    run_and_compare(config, weights, model, "fp64", [50, 31], seed, False, room)


@pytest.mark.parametrize("part", ["rings", "carry", "history"])
def test_state_without_room_for_what_is_taken_back_shows(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: this test can tell. Each of the rings, one token too short."""
    config, weights, model = make_model(torch.float64)
    if part == "rings":
        monkeypatch.setattr(model, "_ring_size", lambda tokens: config.sliding_window)
    else:
        for module in ("models.caches", "models.layers.step", "models.layers.decode_step"):
            too_small = {"carry": lambda ratio, tokens: ratio, "history": lambda ngram, tokens: ngram - 1}[part]
            monkeypatch.setattr(f"deepinfer.{module}.{part}_size", too_small)
    with pytest.raises(AssertionError, match="relative error"):
        for seed in range(20):
            run_and_compare(config, weights, model, "fp64", [60, 60, 60], seed, False)
