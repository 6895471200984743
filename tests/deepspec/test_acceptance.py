"""Acceptance along the target's answers equals what speculative sampling does, run for real on small Markov chains."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from deepinfer.deepspec.acceptance import Acceptance, Answer, Judged, acceptance_of, judge, judge_lookup
from deepinfer.deepspec.calibration import (
    DRAFT_HEATS,
    Observations,
    drawn_lengths,
    expected_calibration_error,
    fit_temperatures,
    reliability,
    survival,
)
from deepinfer.deepspec.losses import Blocks
from deepinfer.deepspec.plots import plot_acceptance, plot_reliability, plot_training
from deepinfer.deepspec.targets import Shape

VOCAB, SIZE, LENGTH = 6, 3, 256


class ChainTarget:
    """p(next | token) is a row of a table: the hidden state is the one-hot token, the head is the table."""

    def __init__(self, seed: int) -> None:
        logits = 2.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
        self.embed, self.head = torch.eye(VOCAB), logits.T.contiguous()
        self.shape = Shape(VOCAB, VOCAB, 1)

    def __call__(self, tokens):
        hidden = F.one_hot(tokens, VOCAB).float()
        return hidden, hidden

    def probabilities(self, temperature: float) -> torch.Tensor:
        if temperature == 0:
            return F.one_hot(self.head.T.argmax(-1), VOCAB).double()
        return torch.softmax(self.head.T.double() / temperature, -1)


def chain_draft(head: torch.Tensor, with_scores: bool = False):
    """Drafts from another table, which is told the true tokens before each."""

    def draft(taps, tokens, anchors):
        at = anchors.unsqueeze(-1) + 1 + torch.arange(SIZE)
        known = tokens[0, at[0]]
        scores = known.float() - 2 if with_scores else None
        return Blocks(F.one_hot(known, VOCAB).float() @ head.T, scores)

    return draft


def write_answers(p: torch.Tensor, count: int, num_tokens: int, seed: int, temperature: float) -> list[Answer]:
    generator, answers = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        ids = [0]
        for _ in range(num_tokens):
            ids.append(int(torch.multinomial(p[ids[-1]], 1, generator=generator)))
        answers.append(Answer(ids, num_tokens, temperature))
    return answers


def speculate(p: torch.Tensor, q: torch.Tensor, rounds: int, seed: int) -> float:
    """Tokens a round of the textbook algorithm: draft from q, accept with min(1, p / q), resample or add a bonus."""
    generator = torch.Generator().manual_seed(seed)
    token, emitted = 0, 0
    for _ in range(rounds):
        drafts, previous = [], token
        for _ in range(SIZE):
            previous = int(torch.multinomial(q[previous], 1, generator=generator))
            drafts.append(previous)
        for draft in drafts:
            before = token
            if float(torch.rand(1, generator=generator)) < min(1.0, float(p[before, draft] / q[before, draft])):
                token, emitted = draft, emitted + 1
            else:
                rest = (p[before] - q[before]).clamp_min(0)
                token = int(torch.multinomial(rest / rest.sum(), 1, generator=generator))
                break
        else:
            token = int(torch.multinomial(p[token], 1, generator=generator))
        emitted += 1
    return emitted / rounds


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_mean_length_is_that_of_speculative_sampling(temperature):
    target = ChainTarget(0)
    other = target.head + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
    p = target.probabilities(temperature)
    q = torch.softmax(other.T.double() / temperature, -1)
    answers = write_answers(p, 50, 240, 2, temperature)  # long: their ends cut rounds short
    judged = [judge(target, chain_draft(other), a, LENGTH, SIZE, is_drawn=True, seed=i) for i, a in enumerate(answers)]
    measured = acceptance_of(judged)
    real = speculate(p, q, 4000, 3)
    assert measured.mean_length == pytest.approx(real, abs=0.09)
    assert 1.3 < real < 3.7  # neither never nor always
    assert measured.rounds > 1000


def test_most_likely_drafts_for_a_target_that_draws():
    """q is one-hot, so min(1, p / q) is p of the draft: the textbook algorithm again, on drafts that are not drawn."""
    target = ChainTarget(0)
    other = target.head + 0.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
    p = target.probabilities(1.0)
    q = F.one_hot(other.T.argmax(-1), VOCAB).double()
    answers = write_answers(p, 50, 240, 2, 1.0)
    judged = [judge(target, chain_draft(other), a, LENGTH, SIZE) for a in answers]
    assert acceptance_of(judged).mean_length == pytest.approx(speculate(p, q, 4000, 3), abs=0.09)


def test_greedy_answers_need_the_same_token():
    target = ChainTarget(0)
    p = target.probabilities(0.0)
    (answer,) = write_answers(p, 1, 40, 0, 0.0)
    same = acceptance_of([judge(target, chain_draft(target.head), answer, LENGTH, SIZE)])
    never = acceptance_of([judge(target, chain_draft(-target.head), answer, LENGTH, SIZE)])
    # 40 tokens: the first comes with the prompt; rounds of 4, the last of what is left.
    assert same == Acceptance(10, 39, 3.9, [1.0, 1.0, 1.0])
    assert never.mean_length == 1.0 and never.by_position == [0.0, 0.0, 0.0]


def test_rounds_walk_past_the_added_token():
    accepted = torch.tensor(
        [[1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0]], dtype=torch.bool
    )
    remaining = torch.tensor([7, 6, 5, 4, 3, 2, 1])
    judged = Judged(accepted, remaining, None)
    assert judged.rounds() == [(0, 2), (3, 3)]
    assert acceptance_of([judged]) == Acceptance(2, 7, 3.5, [1.0, 1.0, 0.5])


@pytest.mark.parametrize("ids,num", [([1, 2, 3], 3), ([1, 2], 1), ([1] * 260, 200)])
def test_answers_that_cannot_be_judged_are_refused(ids, num):
    with pytest.raises(ValueError, match="answer"):
        judge(ChainTarget(0), chain_draft(torch.eye(VOCAB)), Answer(ids, num, 0.0), LENGTH, SIZE)


# ------------------------------------------------------------------ calibration


def observations(true_heat: list[float], count: int = 6000) -> Observations:
    """Scores that are too bold or too shy by known temperatures."""
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(count, len(true_heat), generator=generator, dtype=torch.float64) + 1
    p = torch.sigmoid(scores / torch.tensor(true_heat))
    happened = (torch.rand(scores.shape, generator=generator, dtype=torch.float64) < p).double().cumprod(1)
    return Observations(scores, happened)


def test_temperatures_are_found_again():
    seen = observations([2.0, 0.7, 1.5])
    found = fit_temperatures(seen)
    assert found == pytest.approx([2.0, 0.7, 1.5], rel=0.15)
    before = expected_calibration_error(survival(seen.scores, [1.0] * 3), seen.survived)
    after = expected_calibration_error(survival(seen.scores, found), seen.survived)
    assert after < 0.02 < before


def test_calibration_error_by_hand():
    probability = torch.tensor([0.9, 0.9, 0.1, 0.1], dtype=torch.float64)
    happened = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert reliability(probability, happened) == [(1, pytest.approx(0.1), 0.0, 2), (13, pytest.approx(0.9), 0.5, 2)]
    assert expected_calibration_error(probability, happened) == pytest.approx(0.5 * 0.1 + 0.5 * 0.4)


def test_a_draft_that_is_too_flat_is_found_out():
    """Half the target's logits: divided by 1/2 it is the target, and every draft is accepted."""
    target = ChainTarget(0)
    p = target.probabilities(1.0)
    flat = torch.softmax(target.head.T.double() / 2, -1)
    drawn = write_answers(p, 40, 240, 2, 1.0)
    greedy = write_answers(target.probabilities(0.0), 1, 40, 0, 0.0)
    judged = [judge(target, chain_draft(target.head / 2), a, LENGTH, SIZE, heats=DRAFT_HEATS) for a in drawn + greedy]
    lengths = drawn_lengths(judged)
    assert DRAFT_HEATS[int(lengths.argmax())] == 0.5 and float(lengths.max()) == pytest.approx(1 + SIZE)
    assert float(lengths[DRAFT_HEATS.index(1.0)]) == pytest.approx(speculate(p, flat, 4000, 3), abs=0.09)
    assert drawn_lengths(judged[-1:]) is None  # greedy
    halved = [
        judge(target, chain_draft(target.head / 2), a, LENGTH, SIZE, is_drawn=True, draft_temperature=0.5)
        for a in drawn[:4]
    ]
    assert acceptance_of(halved).by_position == [1.0] * SIZE


def test_observations_are_whole_blocks_and_need_scores():
    target = ChainTarget(0)
    (answer,) = write_answers(target.probabilities(0.0), 1, 10, 0, 0.0)
    judged = judge(target, chain_draft(target.head, with_scores=True), answer, LENGTH, SIZE)
    seen = Observations.of([judged])
    assert seen.scores.shape == seen.survived.shape == (7, SIZE)  # 9 positions, the last two have fewer than 3 left
    assert seen.survived.all()
    with pytest.raises(ValueError, match="confidence head"):
        Observations.of([judge(target, chain_draft(target.head), answer, LENGTH, SIZE)])
    short = replace(judged, remaining=judged.remaining.clamp_max(SIZE - 1))
    for none in ([], [short]):
        with pytest.raises(ValueError, match="none is long enough"):
            Observations.of(none)


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    seen = observations([1.0], 100)
    plot_reliability(tmp_path / "1.svg", {"as trained": (survival(seen.scores, [1.0]), seen.survived)})
    row = {"mean_length": 2.5, "prompt_lookup": 1.5, "by_position": [0.9, 0.5]}
    plot_acceptance(tmp_path / "2.svg", {"code": row, "all": row})
    plot_training(tmp_path / "3.svg", [{"step": 1, "loss": 2.0, "accepted_length": 1.0}])
    for path in sorted(tmp_path.iterdir()):
        assert "<svg" in path.read_text() and "</svg>" in path.read_text()


def test_plots_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="plots need matplotlib"):
        plot_training(tmp_path / "plot.svg", [])


def test_prompt_lookup_is_judged_by_walking():
    """Against a plain search in lists: the longest match of 2 to 4 tokens, then the latest."""
    ids = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    found = judge_lookup(Answer(ids, 40, 0.0), SIZE)
    assert found.accepted.shape == (39, SIZE)
    assert found.remaining.tolist() == list(range(39, 0, -1))

    def look_up(known):
        for count in (4, 3, 2):
            for end in range(len(known) - 1, count - 1, -1):
                if known[end - count : end] == known[-count:]:
                    again = known[end:]
                    return [again[i % len(again)] for i in range(SIZE)]
        return [None] * SIZE

    for place, accepted in enumerate(found.accepted.tolist()):
        known, after = ids[: 21 + place], ids[21 + place :]
        drafts = look_up(known)
        assert accepted == [k < len(after) and drafts[k] == after[k] for k in range(SIZE)], place
    assert acceptance_of([found]).mean_length > 1.2
