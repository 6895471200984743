"""The head that ships with nano drafts what nano says."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import deepinfer
from deepinfer.config.model import ModelConfig
from deepinfer.deepspec.acceptance import Answer, acceptance_of
from deepinfer.deepspec.evaluate import judge_all, lookup_all, open_draft
from deepinfer.deepspec.targets import V41Target
from deepinfer.deepspec.tasks import read_prompts
from deepinfer.llm import LLM
from deepinfer.models.registry import load_model
from deepinfer.params import SamplingParams

NANO = Path(deepinfer.__file__).parent / "checkpoints" / "nano"
pytestmark = pytest.mark.skipif(
    not list(NANO.glob("*.safetensors")) or not ModelConfig.from_file(NANO).num_nextn_predict_layers,
    reason="nano's head is not in this checkout",
)
LENGTH = 128
HELD_OUT = Path(__file__).parents[2] / "benchmarks" / "nano" / "draft_prompts"
LEAST = {"prose": 1.9, "code": 1.9, "tool": 3.0}
PROMPTS = [
    "Once upon a time, there was a lighthouse keeper who",
    "The old market was busy that morning.",
    "The `random` module provides",
    "def read_lines(path):\n",
]


def test_it_loads_with_its_calibration():
    model = load_model(NANO, torch.float32, draft_head=True)
    heat = model.draft_head.temperatures
    assert model.draft_head.block_size == 5 and heat.shape == (5,)
    assert not torch.equal(heat, torch.ones(5)) and (heat > 0).all()
    assert 0 < model.draft_head.draft_temperature < 1  # without a file it is 1
    assert sum(file.stat().st_size for file in NANO.iterdir()) < 60e6


def test_mean_accepted_length_of_greedy_answers():
    """A short check; docs/speculation.md has the figures on held-out prompts."""
    outputs = LLM(NANO, max_num_seqs=4).generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=64))
    answers = []
    for output in outputs:
        written = list(output.outputs[0].token_ids)
        answers.append(Answer([*output.prompt_token_ids, *written], len(written), 0.0))
    target = V41Target(NANO, LENGTH, "cpu")
    judged = judge_all(target, open_draft(target, NANO, LENGTH), answers, LENGTH)
    measured = acceptance_of(judged)
    assert len(judged) == len(PROMPTS)
    assert measured.mean_length > 1.9


@pytest.mark.parametrize("kind", ["prose", "code", "tool"])
def test_accepted_length_on_held_out_prompts(kind):
    """The first few prompts of each kind; better than prompt lookup on the same answers, too."""
    prompts = [list(prompt.token_ids) for prompt in read_prompts(HELD_OUT / f"{kind}.jsonl", 6)]
    outputs = LLM(NANO, max_num_seqs=6).generate(prompts, SamplingParams(temperature=0.0, max_tokens=48))
    answers = [
        Answer([*prompt, *output.outputs[0].token_ids], len(output.outputs[0].token_ids), 0.0)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    target = V41Target(NANO, 512, "cpu")
    draft = open_draft(target, NANO, 512)
    measured, looked_up = (
        acceptance_of(judge(draft, answers, 512)).mean_length for judge in (partial(judge_all, target), lookup_all)
    )
    assert measured > max(LEAST[kind], looked_up)
