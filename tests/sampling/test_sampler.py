"""The sampler against a plain softmax-and-sort oracle, one token at a time in float64."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.sequence import Sequence
from deepinfer.kernels.reference.sampling import uniforms
from deepinfer.outputs import RequestMetrics
from deepinfer.params import MAX_SEED, SamplingParams
from deepinfer.sampling.penalties import edit_logits
from deepinfer.sampling.random import completion_seed
from deepinfer.sampling.sampler import sample

EOS = {2}


def make_sequence(params: SamplingParams, prompt=(1,), output=(), seed: int = 0) -> Sequence:
    seq = Sequence("r", 0, 0, list(prompt), params, seed, RequestMetrics(0.0))
    seq.token_ids.extend(output)
    return seq


def edited_oracle(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    result = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token)
        if token in output:
            logit -= params.presence_penalty
        logit += (params.logit_bias or {}).get(token, 0.0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logit = -math.inf
        if any([*output, token][-len(word) :] == list(word) for word in params.bad_words_token_ids):
            logit = -math.inf
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else EOS)
        if len(output) < params.min_tokens and token in stops:
            logit = -math.inf
        result.append(logit)
    return result


def probabilities_oracle(edited: list[float], params: SamplingParams) -> np.ndarray:
    """Probability of every token; ties at a cut must not occur in the logits given."""
    order = sorted(range(len(edited)), key=lambda token: -edited[token])
    if params.force_topk:
        order = order[: params.force_topk]
    weights = {token: math.exp((edited[token] - edited[order[0]]) / params.temperature) for token in order}
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weights[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass / total < params.top_p and weights[token] >= params.min_p:
            kept.append(token)
        mass += weights[token]
    result = np.zeros(len(edited))
    for token in kept:
        result[token] = weights[token] / sum(weights[t] for t in kept)
    return result


def assert_distribution(drawn: list[int], expected: np.ndarray) -> None:
    """Chi-square with a bound far in the tail (about 1e-7), pooling rare tokens; impossible tokens never occur."""
    counts = np.bincount(drawn, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    mean = expected * len(drawn)
    rare = mean < 8
    counts = np.append(counts[~rare], counts[rare].sum())
    mean = np.append(mean[~rare], mean[rare].sum())
    counts, mean = counts[mean > 0], mean[mean > 0]
    statistic = float(((counts - mean) ** 2 / mean).sum())
    freedom = max(len(mean) - 1, 1)
    assert statistic < freedom + 7 * math.sqrt(2 * freedom) + 20, (statistic, freedom)


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 10, 500]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.05]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    force_topk=st.sampled_from([None, 1, 5, 20]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 29), st.floats(-5, 5), max_size=3),
    min_tokens=st.sampled_from([0, 9]),
    stop_token_ids=st.lists(st.integers(0, 29), max_size=2),
    ignore_eos=st.booleans(),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 29), min_size=8, unique=True),  # more than all that is banned
    bad_words_token_ids=st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=2), max_size=2),
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(params_strategy, st.integers(0, 1000), st.lists(st.integers(0, 29), max_size=8))
def test_draws_follow_the_distribution(params: SamplingParams, logits_seed: int, output: list[int]) -> None:
    logits = np.random.default_rng(logits_seed).normal(0, 2, 30).astype(np.float32)
    prompt = [1, 5, 5, 9]
    expected = probabilities_oracle(edited_oracle(logits.tolist(), params, prompt, output), params)
    sequences = [make_sequence(params, prompt, output, seed) for seed in range(6000)]
    drawn = sample(torch.from_numpy(logits).expand(len(sequences), -1), sequences, EOS).token_ids
    assert_distribution(drawn, expected)


@pytest.mark.parametrize("top_p", [0.5, 0.97, 0.9999])
def test_wide_nucleus(top_p: float) -> None:
    """Flat logits over a vocabulary that is no multiple of anything, cut inside by top_p."""
    size = 3001
    logits = np.random.default_rng(0).normal(0, 0.3, size).astype(np.float32)
    params = SamplingParams(top_p=top_p)
    expected = probabilities_oracle(logits.tolist(), params)
    assert (expected > 0).sum() > 1000
    sequences = [make_sequence(params, seed=seed) for seed in range(4000)]
    drawn = sample(torch.from_numpy(logits).expand(len(sequences), -1), sequences).token_ids
    counts = np.bincount(drawn, minlength=size)
    assert counts[expected == 0].sum() == 0
    pooled = np.array_split(np.argsort(-expected), 24)  # so that each bucket is common
    drawn_buckets = np.repeat(np.arange(24), [counts[bucket].sum() for bucket in pooled])
    assert_distribution(drawn_buckets.tolist(), np.array([expected[bucket].sum() for bucket in pooled]))


def test_successive_draws_of_one_seed_are_independent() -> None:
    every, constant = np.arange(60_000, dtype=np.uint64), np.ones(60_000, np.uint64)
    u = uniforms(42 * constant, every)
    assert 0 <= u.min() and u.max() < 1
    pairs = (u[:-1] * 8).astype(int) * 8 + (u[1:] * 8).astype(int)
    assert_distribution(pairs.tolist(), np.full(64, 1 / 64))
    across = uniforms(every, 3 * constant)
    pairs = (across[:-1] * 8).astype(int) * 8 + (across[1:] * 8).astype(int)
    assert_distribution(pairs.tolist(), np.full(64, 1 / 64))


def test_completions_of_one_request_have_unrelated_draws() -> None:
    seeds = [completion_seed(99, index) for index in range(100)]
    assert seeds == list(range(99, 199))
    assert completion_seed(MAX_SEED, 2) == 1  # seeds wrap around, they never leave the allowed range
    draws = [tuple(uniforms(np.full(20, seed, np.uint64), np.arange(20, dtype=np.uint64))) for seed in seeds]
    assert len({value for draw in draws for value in draw}) == 2000  # no stream is a shifted copy of another


@settings(max_examples=60, deadline=None)
@given(st.lists(params_strategy, min_size=1, max_size=12), st.integers(0, 10_000), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_its_batch(params: list[SamplingParams], seed: int, rng: random.Random) -> None:
    params = params + [SamplingParams(temperature=0), SamplingParams(temperature=0.9, logprobs=3)]
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(params), 30)).astype(np.float32))
    sequences = [make_sequence(p, [1, 2], [3] * row, seed + row) for row, p in enumerate(params)]
    alone = [sample(logits[row : row + 1], [seq], EOS) for row, seq in enumerate(sequences)]
    order = list(range(len(params)))
    rng.shuffle(order)
    together = sample(logits[order], [sequences[row] for row in order], EOS)
    assert together.token_ids == [alone[row].token_ids[0] for row in order]
    assert together.logprobs == [alone[row].logprobs[0] for row in order]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(params_strategy, st.lists(st.integers(0, 29), max_size=20)), min_size=1, max_size=6),
    st.integers(0, 10_000),
)
def test_edits_equal_the_per_token_formula(rows: list[tuple[SamplingParams, list[int]]], seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(rows), 30)).astype(np.float32))
    before = logits.clone()
    prompt = [4, 4, 7]
    sequences = [make_sequence(params, prompt, output) for params, output in rows]
    edited = edit_logits(logits, sequences, EOS)
    assert torch.equal(logits, before), "the model's logits were changed"
    for row, (params, output) in enumerate(rows):
        expected = edited_oracle(before[row].tolist(), params, prompt, output)
        np.testing.assert_allclose(edited[row].numpy(), expected, rtol=1e-5, atol=1e-4)


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [9.0, 1.0, 9.0, 9.0]])
    assert sample(logits, [make_sequence(SamplingParams(temperature=0))] * 2).token_ids == [1, 0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-6])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    rows = [make_sequence(SamplingParams(temperature=temperature), seed=i) for i in range(50)]
    assert sample(logits, rows).token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("force_topk", [None, 1, 4, 100])
@pytest.mark.parametrize("num_top", [0, 3, 20])
def test_logprobs_are_of_the_raw_logits(force_topk: int | None, num_top: int) -> None:
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(
        temperature=0.5, logprobs=num_top, force_topk=force_topk, presence_penalty=2.0, logit_bias={11: 50.0}
    )
    result = sample(logits, [make_sequence(params, [1], [2, 3], seed) for seed in range(3)])
    for row, entry in enumerate(result.logprobs):
        assert entry is not None and entry.token_id == result.token_ids[row]
        raw = logits[row].double().tolist()
        order = sorted(range(12), key=lambda token: -raw[token])[: force_topk or 12]
        normaliser = math.log(sum(math.exp(raw[token]) for token in order))
        expected = raw[entry.token_id] - normaliser if entry.token_id in order else -math.inf
        assert entry.logprob == pytest.approx(expected, abs=1e-5)
        assert [token for token, _ in entry.top] == order[:num_top]
        assert [value for _, value in entry.top] == pytest.approx(
            [raw[token] - normaliser for token in order[:num_top]], abs=1e-5
        )


def test_logprobs_only_where_asked() -> None:
    rows = [make_sequence(SamplingParams(logprobs=1)), make_sequence(SamplingParams())]
    first, second = sample(torch.randn(2, 9), rows).logprobs
    assert first is not None and second is None


def test_golden_tokens_are_forced_with_their_logprobs() -> None:
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(golden_token_ids=[7, 0, 4], logprobs=2)
    for step, golden in enumerate([7, 0, 4]):
        result = sample(logits, [make_sequence(params, [1], [7, 0, 4][:step])])
        assert result.token_ids == [golden] and result.logprobs[0] is not None
        assert result.logprobs[0].logprob == pytest.approx(logits.log_softmax(-1)[0, golden].item(), abs=1e-6)


def test_rows_that_are_not_finite_are_reported_and_spoil_no_other() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(3))
    good = logits.clone()
    logits[0, 4] = math.nan
    logits[2, 0] = math.inf
    logits[3] = -math.inf
    for choice in ({"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1, "presence_penalty": 1.0}):
        params = SamplingParams(logprobs=2, **choice)
        rows = [make_sequence(params, seed=seed) for seed in range(5)]
        result = sample(logits, rows)
        assert result.invalid_rows == [0, 2, 3]
        assert [result.token_ids[row] for row in (1, 4)] == [sample(good, rows).token_ids[row] for row in (1, 4)]
