"""Sampling on a GPU: the same tokens as on a CPU, and nothing in the launch waits for the device."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.params import SamplingParams
from deepinfer.sampling.sampler import launch_sample, sample
from tests.sampling.test_sampler import make_sequence

pytestmark = pytest.mark.gpu
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(top_k=50, top_p=0.95, logprobs=3),
    SamplingParams(top_k=1, min_p=0.2),
    SamplingParams(temperature=1e-300, top_p=1e-6),
    SamplingParams(min_p=0.05, force_topk=700, logprobs=20),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, logprobs=0),
    SamplingParams(logit_bias={3: 60.0}, min_tokens=9, stop_token_ids=[3]),
    SamplingParams(golden_token_ids=[5, 6, 7, 8], logprobs=2),
]


def rows(vocab_size: int, copies: int = 12):
    generator = torch.Generator().manual_seed(vocab_size)
    sequences = [
        make_sequence(params, [1, 2, 2], [4, 2], seed=1000 * copy + row)
        for copy in range(copies)
        for row, params in enumerate(PARAMS)
    ]
    return torch.randn(len(sequences), vocab_size, generator=generator) * 3, sequences


@pytest.mark.parametrize("vocab_size", [800, 8192, 129280])
def test_same_tokens_as_on_a_cpu(vocab_size: int):
    """But for draws at the very edge of a token's share: sums are taken in another order."""
    logits, sequences = rows(vocab_size)
    ours, expected = sample(logits.cuda(), sequences, {2}), sample(logits, sequences, {2})
    assert ours.invalid_rows == expected.invalid_rows == []
    same = [one == other for one, other in zip(ours.token_ids, expected.token_ids, strict=True)]
    assert same.count(False) <= 2
    for is_same, one, other in zip(same, ours.logprobs, expected.logprobs, strict=True):
        assert (one is None) == (other is None)
        if is_same and one is not None and other is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4)


def test_a_row_does_not_depend_on_its_batch():
    logits, sequences = rows(8192, copies=3)
    together = sample(logits.cuda(), sequences)
    for row, sequence in enumerate(sequences):
        assert sample(logits[row : row + 1].cuda(), [sequence]).token_ids == [together.token_ids[row]]


def test_the_launch_never_waits():
    logits, sequences = rows(8192)
    on_device = logits.cuda()
    expected = sample(on_device, sequences, {2})  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = launch_sample(on_device, sequences, {2})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launched.token_ids.is_cuda
    result = launched.read()
    assert result == expected
    assert launched.token_ids.tolist() == result.token_ids


def test_rows_that_are_not_finite_are_reported():
    logits, sequences = rows(800, copies=1)
    logits[1, 5], logits[3, 0], logits[4] = math.nan, math.inf, -math.inf
    assert sample(logits.cuda(), sequences).invalid_rows == [1, 3, 4]
