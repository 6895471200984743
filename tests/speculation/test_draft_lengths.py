"""How many drafts are verified: the best there is by brute force, and never more than pays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.decode_curve import DecodeCurve
from deepinfer.engine.drafters import times_by_rows
from deepinfer.speculation.acceptance import PRIOR_RATE, AcceptanceRates
from deepinfer.speculation.draft_lengths import draft_lengths, expected_rates

chances = st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3)


@settings(deadline=None)
@given(
    rates=st.lists(chances, min_size=1, max_size=4),
    room=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    steps=st.lists(st.floats(0.0, 3.0), min_size=13, max_size=13),
)
def test_no_other_choice_gives_more_tokens_a_millisecond(
    rates: list[list[float]], room: list[int], steps: list[float]
) -> None:
    survival = np.cumprod(np.array(rates), axis=1)
    limits = np.array(room[: len(rates)])
    step_ms = 1.0 + np.cumsum(steps)  # rises, by anything
    got = draft_lengths(survival, limits, step_ms)

    def theta(lengths: tuple[int, ...]) -> float:
        tau = len(rates) + sum(survival[i, :n].sum() for i, n in enumerate(lengths))
        return tau / step_ms[sum(lengths)]

    choices = itertools.product(*(range(limit + 1) for limit in limits))
    assert (got <= limits).all()
    assert theta(tuple(got)) == pytest.approx(max(map(theta, choices)))


def test_a_step_that_only_grows_slower_is_filled_and_a_steep_one_is_not() -> None:
    survival = np.array([[0.9, 0.8, 0.1], [0.5, 0.2, 0.1]])
    room = np.array([3, 3])
    flat, steep = np.full(7, 2.0), np.arange(2.0, 9.0)
    assert draft_lengths(survival, room, flat).tolist() == [3, 3]
    assert draft_lengths(survival, room, steep).tolist() == [0, 0]
    stairs = np.array([1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0])  # padded to 4 rows
    assert draft_lengths(survival, room, stairs).tolist() == [2, 0]


@given(rates=st.lists(chances, min_size=1, max_size=4), steps=st.lists(st.floats(0.0, 3.0), min_size=13, max_size=13))
def test_the_rate_of_one_step_is_that_of_its_lengths(rates: list[list[float]], steps: list[float]) -> None:
    survival, step_ms = np.cumprod(np.array(rates), axis=1), 1.0 + np.cumsum(steps)
    lengths = draft_lengths(survival, np.full(len(rates), 3), step_ms)
    tau = len(rates) + sum(survival[i, :n].sum() for i, n in enumerate(lengths))
    got, of_all = expected_rates(survival, len(rates), step_ms[: 3 * len(rates) + 1])
    assert got == pytest.approx(tau / step_ms[lengths.sum()])
    assert of_all == pytest.approx((len(rates) + survival.sum()) / step_ms[3 * len(rates)])
    twice = np.concatenate((survival, survival))  # two such steps
    assert expected_rates(twice, len(rates), step_ms[: 3 * len(rates) + 1]) == pytest.approx((got, of_all))


def test_times_are_those_of_the_padded_sizes() -> None:
    curve = DecodeCurve(((1, 1.0), (4, 2.0), (8, 6.0)))
    assert times_by_rows(curve, 9, [1, 4, 8]).tolist() == [1.0, 1.0, 2.0, 2.0, 2.0, 6.0, 6.0, 6.0, 6.0, 7.0]
    disturbed = DecodeCurve(((1, 5.0), (4, 2.0), (8, 6.0)))
    assert times_by_rows(disturbed, 4).tolist() == [2.0] * 5
    assert times_by_rows(curve, 4).tolist() == [1.0, 1.0, pytest.approx(4 / 3), pytest.approx(5 / 3), 2.0]


def test_rates_follow_what_is_accepted() -> None:
    rates = AcceptanceRates(2, 3)
    assert rates.survival(0) == pytest.approx([PRIOR_RATE, PRIOR_RATE**2, PRIOR_RATE**3])
    rng = np.random.default_rng(0)
    for _ in range(3000):  # each draft is accepted by itself in 1 of 4 cases
        accepted = 0
        while accepted < 3 and rng.random() < 0.25:
            accepted += 1
        rates.observe(1, 3, accepted)
    assert rates.survival(1)[0] == pytest.approx(0.25, abs=0.05)
    assert rates.survival(1)[1] == pytest.approx(0.0625, abs=0.04)
    assert rates.survival(0)[0] == pytest.approx(PRIOR_RATE)  # another kind
    for _ in range(2000):  # times change, and what was is forgotten
        rates.observe(1, 3, 3)
    assert rates.survival(1)[2] > 0.9


@pytest.mark.parametrize("until_first_fall", [False, True])
def test_a_chance_that_is_no_number_is_none(until_first_fall: bool) -> None:
    """A head that overflowed: its drafts are left out, and nobody gets more than there is room for."""
    survival = np.array([[np.nan, np.nan], [0.9, 0.8], [0.9, 0.8]])
    lengths = draft_lengths(survival, np.array([2, 0, 2]), np.ones(20), until_first_fall=until_first_fall)
    assert lengths.tolist() == [0, 0, 2]
