"""max_tokens 0: nothing is generated, the prompt may fill the context, and its log-probabilities come all the same."""

from __future__ import annotations

import pytest
import torch

from deepinfer.models import reference
from deepinfer.models.random_weights import random_weights
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.engine.test_engine_workloads import assert_idle, record
from tests.engine.test_speculation_models import (
    CONFIG,
    METHODS,
    TOKEN_MAP,
    drafts_cost_nothing,  # noqa: F401  (a fixture)
    make_engine,
)

CONTEXT = 80
PROMPTS = [[3 + number * 7 % 400 for number in range(length)] for length in (CONTEXT, 1, 33)]


def outputs(speculative: dict | None, overlap: bool, **params: object) -> list[RequestOutput]:
    engine = make_engine(
        speculative, zero_overhead_scheduling=overlap, cuda_graphs=overlap, max_model_len=CONTEXT, num_blocks=13
    )
    assert engine.max_model_len == CONTEXT
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=0, **params))
        engine.add_request(f"beside {number}", prompt[:40], SamplingParams(max_tokens=3, temperature=0))
    got: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        record(got, engine.step())
        engine.scheduler.check_integrity()
    assert_idle(engine)
    assert all(len(got[f"beside {number}"].outputs[0].token_ids) == 3 for number in range(len(PROMPTS)))
    assert engine.stats().num_output_tokens == 3 * len(PROMPTS)
    return [got[str(number)] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("speculative", [None, METHODS[0], METHODS[2]], ids=["plain", "ngram", "dspark"])
def test_nothing_is_generated(speculative: dict | None, overlap: bool) -> None:
    for output in outputs(speculative, overlap, n=2, logprobs=1):
        assert output.error is None and output.prompt_logprobs is None
        for completion in output.outputs:
            assert completion.token_ids == [] and not completion.logprobs
            assert (completion.finish_reason, completion.stop_reason) == ("length", None)


def test_the_prompt_has_its_log_probabilities() -> None:
    weights = {name: weight.double() for name, weight in random_weights(CONFIG, seed=0).items()}
    for prompt, output in zip(PROMPTS, outputs(METHODS[0], True, prompt_logprobs=0), strict=True):
        logits = reference.forward(weights, CONFIG, torch.tensor([prompt]), TOKEN_MAP)[0]
        expected = torch.log_softmax(logits, -1)[range(len(prompt) - 1), prompt[1:]]
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        got = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
        assert got == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_longer_prompt_is_refused() -> None:
    engine = make_engine(None, max_model_len=CONTEXT)
    for length, max_tokens in ((CONTEXT + 1, 0), (CONTEXT, 1), (CONTEXT, None)):
        with pytest.raises(ValueError, match=f"prompt_token_ids has {length} tokens"):
            engine.add_request("long", [3] * length, SamplingParams(max_tokens=max_tokens))
