"""Rejection sampling leaves the distribution as it is: chi-square tests, and probabilities against draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.kernels import ops
from deepinfer.kernels.reference.rejection import uniform_numbers
from deepinfer.kernels.reference.sampling import uniforms

VOCAB_SIZE = 12
DRAWS = 40_000
# temperature, candidates, top_p, min_p
SETTINGS = [
    (1.0, VOCAB_SIZE, 1.0, 0.0),
    (0.6, VOCAB_SIZE, 1.0, 0.0),
    (1.7, 5, 1.0, 0.0),
    (1.0, VOCAB_SIZE, 0.7, 0.0),
    (1.3, 8, 0.85, 0.05),
    (0.9, VOCAB_SIZE, 1.0, 0.1),
]


def chi_square_bound(degrees: int) -> float:
    """Exceeded with a probability of about 1e-6 (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3


def assert_distributed_like(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    possible = probabilities > 0
    assert (counts[~possible] == 0).all(), "a token that is impossible was drawn"
    expected = probabilities[possible].double() * len(tokens)
    statistic = float(((counts[possible] - expected).square() / expected).sum())
    assert statistic < chi_square_bound(int(possible.sum()) - 1 or 1)


def repeated(logits: torch.Tensor, setting: tuple, count: int) -> tuple[torch.Tensor, ...]:
    temperature, candidates, top_p, min_p = setting
    return (
        logits.expand(count, -1).contiguous(), torch.full((count,), temperature, dtype=torch.float64),
        torch.full((count,), candidates), torch.full((count,), top_p, dtype=torch.float64),
        torch.full((count,), min_p, dtype=torch.float64),
    )  # fmt: skip


def draw(logits: torch.Tensor, setting: tuple, seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    rows, temperature, candidates, top_p, min_p = repeated(logits, setting, len(seeds))
    most = setting[1] if setting[1] < VOCAB_SIZE else 0
    return ops.draw_tokens(rows, temperature, candidates, most, top_p, min_p, seeds, counters)[0]


def probabilities_of(logits: torch.Tensor, setting: tuple) -> torch.Tensor:
    rows, temperature, candidates, top_p, min_p = repeated(logits, setting, 1)
    filters = setting[1] < VOCAB_SIZE or setting[2] < 1
    return ops.token_probabilities(rows, temperature, candidates, top_p, min_p, filters)[0]


def some_logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 1.5


@pytest.mark.parametrize("setting", SETTINGS)
def test_probabilities_are_those_that_tokens_are_drawn_with(setting: tuple) -> None:
    probabilities = probabilities_of(some_logits(1), setting)
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-5)
    tokens = draw(some_logits(1), setting, torch.arange(DRAWS), torch.full((DRAWS,), 7))
    assert_distributed_like(tokens, probabilities)
    assert set(tokens.tolist()) == set(probabilities.nonzero().flatten().tolist())


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", ["near", "far", "same"])
def test_verified_drafts_are_distributed_like_the_target(setting: tuple, drafter: str) -> None:
    target_logits = some_logits(2)
    noise = {"near": 0.5, "far": 3.0, "same": 0.0}[drafter]
    draft_logits = target_logits + noise * some_logits(3)
    target, draft = probabilities_of(target_logits, setting), probabilities_of(draft_logits, setting)
    seeds, counters = torch.arange(DRAWS) * 7919, torch.full((DRAWS,), 3)
    drafts = draw(draft_logits, setting, seeds ^ 0x123456789, counters)
    rows = target.expand(DRAWS, -1), draft.expand(DRAWS, -1)
    tokens = ops.accept_or_resample(*rows, drafts, seeds, counters)
    assert_distributed_like(tokens, target)
    # As many are accepted as two distributions have in common.
    accepted = float((tokens == drafts).double().mean())
    assert accepted == pytest.approx(float(torch.minimum(target, draft).sum()), abs=0.015)
    assert drafter != "same" or accepted == 1.0


def test_a_test_that_takes_every_draft_would_be_caught() -> None:
    setting = SETTINGS[0]
    drafts = draw(some_logits(2) + some_logits(3), setting, torch.arange(DRAWS), torch.full((DRAWS,), 3))
    with pytest.raises(AssertionError):
        assert_distributed_like(drafts, probabilities_of(some_logits(2), setting))


def test_a_greedy_row_is_certain() -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0, *[0.0] * 8])
    target = probabilities_of(logits, (0.0, VOCAB_SIZE, 1.0, 0.0))
    assert target.tolist() == [0.0, 1.0, *[0.0] * 10]
    other = torch.zeros(VOCAB_SIZE).index_fill_(0, torch.tensor(3), 1.0)
    rows = target.expand(2, -1), torch.stack((target, other))
    assert ops.accept_or_resample(*rows, torch.tensor([1, 3]), torch.arange(2), torch.arange(2)).tolist() == [1, 1]


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=20))
def test_uniform_numbers_are_those_of_numpy(pairs: list[tuple[int, int]]) -> None:
    seeds, counters = (np.array(column, np.uint64) for column in zip(*pairs, strict=True))
    got = uniform_numbers(*(torch.from_numpy(x.view(np.int64)) for x in (seeds, counters)))
    assert got.tolist() == uniforms(seeds, counters).tolist()
