"""Beam search against a search written down in full, and against looking at every continuation there is."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.beam_search import Beam, BeamSearchParams, beam_search
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.llm import LLM
from tests.engine.toy_model import VOCAB_SIZE, ToyRunner, full_logits

EOS = {3}


def log_softmax(token_ids: list[int], vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    logits = full_logits(token_ids).astype(np.float64)[:vocab_size]
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def likeliest(sequences: list[list[int]], count: int, vocab_size: int = VOCAB_SIZE) -> list[list[tuple[int, float]]]:
    found = []
    for token_ids in sequences:
        logprobs = log_softmax(token_ids, vocab_size)
        found.append([(int(t), float(logprobs[t])) for t in np.argsort(-logprobs, kind="stable")[:count]])
    return found


def by_definition(prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """All rounds to the end, without a thought of stopping early."""
    ends = set() if params.ignore_eos else EOS
    alive: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[list[int], float]] = []
    for _ in range(params.max_tokens):
        grown = []
        for tokens, total in alive:
            [nearest] = likeliest([prompt + tokens], params.beam_width + len(ends))
            grown += [([*tokens, token], total + logprob) for token, logprob in nearest]
        done += [entry for entry in grown if entry[0][-1] in ends]
        alive = sorted((entry for entry in grown if entry[0][-1] not in ends), key=lambda e: -e[1])[: params.beam_width]
    done += alive
    done.sort(key=lambda entry: -entry[1] / len(entry[0]) ** params.length_penalty)
    return done[: params.beam_width]


searches = st.builds(
    BeamSearchParams,
    beam_width=st.integers(1, 5),
    max_tokens=st.integers(1, 8),
    ignore_eos=st.booleans(),
    length_penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]),
)
prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(prompts, min_size=1, max_size=3), searches)
def test_equals_the_definition(asked: list[list[int]], params: BeamSearchParams) -> None:
    for prompt, beams in zip(asked, beam_search(asked, params, EOS, 1000, likeliest), strict=True):
        expected = by_definition(prompt, params)
        assert [list(beam.token_ids) for beam in beams] == [tokens for tokens, _ in expected]
        assert [beam.cumulative_logprob for beam in beams] == pytest.approx([total for _, total in expected])
        for beam in beams:
            ended = beam.token_ids[-1] in EOS and not params.ignore_eos
            assert beam.finish_reason == ("stop" if ended else "length")


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all(seed: int) -> None:
    """Four tokens, three steps: 16 beams hold every one that is not finished."""
    params = BeamSearchParams(beam_width=16, max_tokens=3, ignore_eos=True, length_penalty=0.0)
    [beams] = beam_search([[seed]], params, (), 100, lambda asked, count: likeliest(asked, count, 4))

    def total(tokens: tuple[int, ...]) -> float:
        return sum(log_softmax([seed, *tokens[:i]], 4)[token] for i, token in enumerate(tokens))

    best = sorted(itertools.product(range(4), repeat=3), key=lambda tokens: -total(tokens))[:16]
    assert [beam.token_ids for beam in beams] == best


def test_a_search_that_cannot_be_beaten_any_more_ends() -> None:
    rounds = []

    def certain(asked: list[list[int]], count: int) -> list[list[tuple[int, float]]]:
        rounds.append(len(asked))
        return [[(3, -0.1), (4, -5.0), (5, -6.0)][:count] for _ in asked]

    params = BeamSearchParams(beam_width=2, max_tokens=50, length_penalty=0.0)
    [beams] = beam_search([[1]], params, EOS, 1000, certain)
    assert [beam.token_ids for beam in beams] == [(3,), (4, 3)] and rounds == [1, 2]


def test_the_context_ends_a_search() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)
    [beams] = beam_search([[1] * 7], params, EOS, 10, likeliest)
    assert [(len(beam.token_ids), beam.finish_reason) for beam in beams] == [(3, "length")] * 2


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_finds_the_same(overlap: bool) -> None:
    config = EngineConfig(block_size=4, num_blocks=100, max_num_seqs=4, zero_overhead_scheduling=overlap)
    llm = LLM.from_engine(Engine(ToyRunner(100, 4, 4), config, EOS))
    asked = [[5, 9], [7], [1, 2, 3]]
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    for prompt, beams in zip(asked, llm.beam_search(asked, params), strict=True):
        assert [list(beam.token_ids) for beam in beams] == [tokens for tokens, _ in by_definition(prompt, params)]
        assert all(beam.text == "" for beam in beams)
    assert [beam.token_ids for beam in llm.beam_search([5, 9], params)[0]] == [
        tuple(tokens) for tokens, _ in by_definition([5, 9], params)
    ]
    with pytest.raises(ValueError, match="prompt 1: prompt_token_ids must be integers"):
        llm.beam_search([[5], [VOCAB_SIZE]], params)
    with pytest.raises(ValueError, match="beam_width must be at most 18"):
        beam_search([[5]], BeamSearchParams(beam_width=19, max_tokens=1), {3, 4}, 100, likeliest)


@pytest.mark.parametrize(
    ("field", "value"),
    [("beam_width", 0), ("beam_width", 20), ("beam_width", True), ("max_tokens", 0), ("max_tokens", 1.5)]
    + [("ignore_eos", 1), ("length_penalty", math.nan), ("length_penalty", "1"), ("length_penalty", 11)],
)  # fmt: skip
def test_bad_values_name_the_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, field: value})  # type: ignore[arg-type]


def test_scores_of_a_beam() -> None:
    beam = Beam((1, 2, 3, 4), -8.0)
    assert (beam.score(0.0), beam.score(1.0), beam.score(0.5)) == (-8.0, -2.0, -4.0)
