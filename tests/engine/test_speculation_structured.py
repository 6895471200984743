"""Drafts under a grammar: masks follow them row by row, and what comes out is what comes out without them."""

from __future__ import annotations

import json
from functools import cache

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import resolve_model
from deepinfer.engine.runner import ModelRunner
from tests.engine.test_speculation import TellTale
from tests.structured.grammars import NANO

SCHEMA = {"type": "array", "items": {"enum": ["left", "right"]}, "minItems": 6, "maxItems": 9}
CASES = [
    ("Say yes and no.", {"schema_type": "regex", "schema": "(yes no ){6}[0-9]{3}"}),
    ("Where to?", {"schema_type": "json", "schema": json.dumps(SCHEMA)}),
    ("Which one?", {"schema_type": "choice", "schema": ["left left left", "right right right"]}),
    ("Once upon a time", None),
]
NUM_DRAFTS = 4


def params() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=heat, seed=number, max_tokens=60, so_args=so_args, n=2)
        for heat in (0.0, 1.0)
        for number, (_, so_args) in enumerate(CASES)
    ]


@cache
def plain() -> LLM:
    if not list(NANO.glob("*.safetensors")):
        pytest.skip("the nano weights are not in this checkout")
    return LLM("nano", max_num_seqs=8, max_model_len=256)


def answers(llm: LLM) -> list[list[tuple]]:
    outputs = llm.generate([prompt for prompt, _ in CASES] * 2, params())
    assert all(output.error is None for output in outputs)
    return [[(c.token_ids, c.finish_reason, c.text) for c in output.outputs] for output in outputs]


@cache
def plain_answers() -> list[list[tuple]]:
    return answers(plain())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("honesty", [None, 0.0, 0.8])
def test_answers_are_those_without_drafts(overlap: bool, honesty: float | None) -> None:
    """Drafts from the text itself, drafts that are mostly right, and some that no grammar allows."""
    want = plain_answers()
    config = EngineConfig(
        max_num_seqs=8,
        max_model_len=256,
        zero_overhead_scheduling=overlap,
        cuda_graphs=overlap,
        speculative_config={"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "variable_length": False},
    )
    runner = ModelRunner.from_checkpoint(resolve_model("nano"), config)
    drafter = None
    if honesty is not None:
        prompts = [plain().tokenizer.encode_text(prompt) for prompt, _ in CASES] * 2
        texts = [prompts[i] + list(tokens) for i, outputs in enumerate(want) for tokens, _, _ in outputs]
        drafter = TellTale(NUM_DRAFTS, 8, [t for text in texts for t in (text, [0, *text])], honesty, 1)
    engine = Engine(runner, config, runner.eos_token_ids, drafter=drafter)
    engine.grammars = plain().engine.grammars
    llm = LLM.from_engine(engine, plain().tokenizer)
    assert answers(llm) == want
    totals = engine.observer.stats.totals
    assert totals["draft_tokens"] > 0 and (totals["accepted"] > 0 or honesty == 0.0)
