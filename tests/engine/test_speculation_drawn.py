"""Drafts that are drawn: rejection sampling through the engine leaves the distribution of every token as it is."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.kernels import ops
from deepinfer.models.inputs import ModelInputs
from deepinfer.params import SamplingParams
from deepinfer.speculation.drafter import Drafts, Round
from deepinfer.speculation.slot_tokens import SlotTokens
from deepinfer.speculation.step_times import StepTimes
from tests.engine.test_engine_workloads import EOS
from tests.engine.toy_grammar import CHARACTERS, compiler
from tests.engine.toy_model import ToyRunner, full_logits
from tests.kernels.test_rejection import assert_distributed_like

VOCAB_SIZE = 61
PROMPT = [5, 9, 2]
REQUESTS = 3000


class Roulette:
    """A Drafter that draws from distributions of its own, and whose chances tell what was drawn before them."""

    learns = True

    def __init__(self, num_drafts: int, is_honest: bool) -> None:
        self.num_drafts = num_drafts
        self.probabilities = torch.zeros(61, num_drafts, VOCAB_SIZE)
        self.is_honest = is_honest  # about the distributions that it drew from
        self.generator = torch.Generator().manual_seed(1)
        self.taste = 2 * torch.randn(num_drafts, VOCAB_SIZE, generator=self.generator)  # what it always prefers
        self.num_rounds = self.num_accepted = 0

    def expect(self, drafts: bool) -> None: ...

    def prefilled(self, inputs: ModelInputs) -> None: ...

    def resumed(self, slot: int, token_ids: array) -> None: ...

    def chosen(self, state: SlotTokens, round: Round) -> None:
        self.num_accepted += int(round.accepted.sum())

    def draft(self, state: SlotTokens, round: Round) -> Drafts:
        count = len(round.slots)
        logits = self.taste + torch.randn(count, self.num_drafts, VOCAB_SIZE, generator=self.generator)
        probabilities = logits.softmax(-1)
        flat = probabilities.flatten(0, 1)
        tokens = torch.multinomial(flat, 1, generator=self.generator).view(count, self.num_drafts)
        # The chance of a draft may follow from those before it: here even numbers promise much.
        behind = torch.where(tokens[:, :-1] % 2 == 0, 0.99, 0.05)
        scores = torch.cat((torch.full((count, 1), 0.9), behind), dim=1)
        self.probabilities[round.slots] = probabilities if self.is_honest else 1 / VOCAB_SIZE
        return Drafts(tokens, scores)

    def survival(self, scores: np.ndarray) -> np.ndarray:
        return np.cumprod(scores, axis=1)

    def learn(self, scores: np.ndarray, num_verified: np.ndarray, num_accepted: np.ndarray) -> None:
        self.num_rounds += len(num_verified)


def outputs(params: dict, drafter: Roulette, overlap: bool) -> list[list[int]]:
    config = EngineConfig(
        block_size=4, num_blocks=200, max_num_seqs=60, max_num_batched_tokens=200, zero_overhead_scheduling=overlap
    )
    runner = ToyRunner(200, 4, 60, room=1 + drafter.num_drafts)
    engine = Engine(runner, config, drafter=drafter)
    engine.grammars = compiler()
    assert engine.speculation is not None
    rises = StepTimes(40.0 + np.arange(1000.0), np.zeros(61), drafter.num_drafts)
    rises.observe = lambda *step: None  # lengths follow the drafts' chances, whatever this machine does
    engine.speculation.times = rises
    gate = engine.speculation.gate
    gate.makes_drafts, gate.learn = lambda num_sequences: True, lambda num_expected, num_accepted: None
    tokens: dict[str, list[int]] = {}
    for number in range(REQUESTS):
        sampling = SamplingParams(seed=number, max_tokens=4, ignore_eos="so_args" not in params, **params)
        engine.add_request(str(number), PROMPT, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    return list(tokens.values())


# A letter of the first half is followed by one of the second, and the other way round: masks follow the drafts.
ZIGZAG = {"schema_type": "regex", "schema": "([a-z][A-Z0-9]|[A-Z0-9][a-z]){2}"}


def follows(output: list[int], token: int) -> bool:
    """Whether ZIGZAG allows a token there."""
    is_lower = CHARACTERS[token].islower()
    return token not in EOS and (len(output) % 2 == 0 or CHARACTERS[output[-1]].islower() != is_lower)


def distribution(prefix: list[int], params: dict) -> torch.Tensor:
    logits = torch.from_numpy(full_logits(prefix))[None]
    for token in set(prefix):
        repetition, logit = params.get("repetition_penalty", 1.0), float(logits[0, token])
        logits[0, token] = logit / repetition if logit > 0 else logit * repetition
    for token in prefix[len(PROMPT) :]:
        logits[0, token] -= params.get("frequency_penalty", 0.0)
    for token in set(prefix[len(PROMPT) :]):
        logits[0, token] -= params.get("presence_penalty", 0.0)
    if "so_args" in params:
        logits[0, [token for token in range(VOCAB_SIZE) if not follows(prefix[len(PROMPT) :], token)]] = -torch.inf
    column = [torch.tensor([value]) for value in (params["temperature"], params.get("top_k", VOCAB_SIZE), 1.0, 0.0)]
    temperature, candidates, top_p, min_p = column
    return ops.token_probabilities(
        logits, temperature.double(), candidates, params.get("top_p", 1.0) * top_p.double(), min_p.double(), True
    )[0]


def marginals(params: dict) -> list[torch.Tensor]:
    """Of the first three tokens, by going through all that come before."""
    first = distribution(PROMPT, params)
    second, third = torch.zeros(VOCAB_SIZE), torch.zeros(VOCAB_SIZE)
    for a in first.nonzero().flatten().tolist():
        behind_a = distribution([*PROMPT, a], params)
        second += first[a] * behind_a
        for b in behind_a.nonzero().flatten().tolist():
            third += first[a] * behind_a[b] * distribution([*PROMPT, a, b], params)
    return [first, second, third]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 20},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.8, "presence_penalty": 1.5},
        {"temperature": 1.2, "so_args": ZIGZAG},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "presence_penalty": 2.0, "so_args": ZIGZAG},
    ],
    ids=("plain", "top_k", "top_p", "penalties", "grammar", "all"),
)
def test_every_token_is_distributed_as_without_drafts(params: dict, overlap: bool) -> None:
    drafter = Roulette(3, True)
    tokens = outputs(params, drafter, overlap)
    assert len(tokens) == REQUESTS and drafter.num_accepted > REQUESTS / 20 and drafter.num_rounds > REQUESTS / 2
    for place, expected in enumerate(marginals(params)):
        assert_distributed_like(torch.tensor([row[place] for row in tokens]), expected)


def test_a_drafter_that_lies_about_its_distribution_shows() -> None:
    """A negative control: this many requests can tell."""
    params = {"temperature": 1.0}
    tokens = outputs(params, Roulette(3, False), False)
    with pytest.raises(AssertionError):
        for place, expected in enumerate(marginals(params)):
            assert_distributed_like(torch.tensor([row[place] for row in tokens]), expected)
