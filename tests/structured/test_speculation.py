"""Drafts under grammars: nano's own draft head and prompt lookup give the tokens of decoding one by one."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema
import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.outputs import CompletionOutput
from tests.engine.test_speculation_models import drafts_cost_nothing  # noqa: F401  (a fixture)
from tests.structured.grammars import NANO, tokenizer

pytestmark = pytest.mark.skipif(
    not list(NANO.glob("*.safetensors")), reason="the nano weights are not in this checkout"
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9}, "tags": {"type": "array", "items": {"enum": ["red", "blue"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}  # fmt: skip
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 6, "maxItems": 9}
TREE = {"type": "object", "properties": {"v": {"type": "null"}, "next": {"$ref": "#"}}, "additionalProperties": False}
WORDS = "(left|right|up){3,5} [0-9]{4}"
GRAMMARS: list[dict[str, Any]] = [
    *({"schema_type": "json", "schema": json.dumps(schema)} for schema in (PERSON, NUMBERS, TREE)),
    {"schema_type": "regex", "schema": WORDS},
    {"schema_type": "ebnf", "schema": 'root ::= item (" | " item){3,5}\nitem ::= "yes" | "no" | [a-c]+'},
]
PROMPTS = ["A list: red, blue, red, blue, red, blue,", '{"name": "Anna", "tags": ["red", "blue"]}\n{"name": "Anna",']
LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
HEAD = {"method": "dspark"}
FEW_BLOCKS = {"num_blocks": 7, "max_model_len": 100}
METHODS: dict[str, dict[str, Any]] = {
    "head": {"speculative_config": HEAD},
    "head, overlap": {"speculative_config": HEAD, "zero_overhead_scheduling": True},
    "head, preemption": {"speculative_config": HEAD, **FEW_BLOCKS},
    "lookup, overlap": {"speculative_config": LOOKUP, "zero_overhead_scheduling": True},
    "lookup, swap": {"speculative_config": LOOKUP, "preemption_mode": "swap", **FEW_BLOCKS},
}


def outputs(**options: Any) -> tuple[LLM, list[CompletionOutput]]:
    """In float64, where the number of rows of a step cannot tip a token. Every third output is cut short."""
    engine = {"max_num_seqs": 16, "max_model_len": 128, "block_size": 32} | options
    llm = LLM("nano", dtype="fp64", kv_cache_dtype="fp64", **engine)
    cases = [(so_args, temperature) for so_args in GRAMMARS for temperature in (0.0, 1.0)]
    params = [
        SamplingParams(
            temperature=temperature, seed=number, n=1 + number % 2, max_tokens=5 if number % 3 == 2 else 18,
            logprobs=2 if number % 4 == 1 else None, stop=["right", "b"] if number > 7 else [], so_args=so_args,
        )
        for number, (so_args, temperature) in enumerate(cases)
    ]  # fmt: skip
    found = llm.generate([PROMPTS[number // 2 % 2] for number in range(len(cases))], params)
    assert [output.error for output in found] == [None] * len(cases)
    return llm, [completion for output in found for completion in output.outputs]


@cache
def without_drafts() -> list[CompletionOutput]:
    return outputs()[1]


@pytest.mark.parametrize("name", METHODS)
def test_drafts_change_no_token_of_a_structure(name: str) -> None:
    llm, found = outputs(**METHODS[name])
    expected = without_drafts()
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.token_ids, ours.finish_reason, ours.stop_reason, ours.text) == (
            theirs.token_ids, theirs.finish_reason, theirs.stop_reason, theirs.text,
        )  # fmt: skip
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        for item, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert item.logprob == pytest.approx(other.logprob, abs=1e-9)
            assert dict(item.top) == pytest.approx(dict(other.top), abs=1e-9)
    assert {completion.finish_reason for completion in found} == {"stop", "length"}
    assert {completion.stop_reason for completion in found} > {"b"}
    totals = llm.engine.observer.stats.totals
    assert totals["draft_tokens"] > totals["accepted"] > 0
    assert (llm.engine.scheduler.num_preemptions > 0) == ("num_blocks" in METHODS[name])


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_drafts_that_are_drawn_cannot_violate_a_structure(temperature: float) -> None:
    """The head draws its drafts without a grammar; those that it forbids are never accepted."""
    config = HEAD | {"draft_sample_method": "probabilistic", "variable_length": False}
    llm = LLM("nano", max_num_seqs=16, max_model_len=160, speculative_config=config)
    cases = [{"schema_type": "regex", "schema": WORDS}, GRAMMARS[1]] * 8
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=80, so_args=so_args)
        for number, so_args in enumerate(cases)
    ]
    num_complete = 0
    for number, output in enumerate(llm.generate([PROMPTS[number % 2] for number in range(16)], params)):
        (completion,) = output.outputs
        assert output.error is None
        if completion.finish_reason == "stop":
            num_complete += 1
            text = tokenizer().decode(completion.token_ids[:-1])
            if number % 2:
                jsonschema.validate(json.loads(text), NUMBERS)
            else:
                assert re.fullmatch(WORDS, text)
    totals = llm.engine.observer.stats.totals
    assert num_complete >= 12 and totals["draft_tokens"] > totals["accepted"] > 0
