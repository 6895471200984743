"""Drafts under grammars: nano's own draft head and prompt lookup give the tokens of decoding one by one."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams
from tests.engine.test_speculation_models import drafts_cost_nothing  # noqa: F401  (a fixture)
from tests.structured.grammars import NANO

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
GRAMMARS: list[dict[str, Any]] = [
    *({"schema_type": "json", "schema": json.dumps(schema)} for schema in (PERSON, NUMBERS, TREE)),
    {"schema_type": "regex", "schema": "(left|right|up){3,5} [0-9]{4}"},
    {"schema_type": "ebnf", "schema": 'root ::= item (" | " item){3,5}\nitem ::= "yes" | "no" | [a-c]+'},
]
PROMPTS = ["A list: red, blue, red, blue, red, blue,", '{"name": "Anna", "tags": ["red", "blue"]}\n{"name": "Anna",']
METHODS: list[dict[str, Any]] = [
    {"speculative_config": {"method": "dspark"}},
    {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        "zero_overhead_scheduling": True,
    },
]


def outputs(**options: Any) -> tuple[LLM, list[tuple[list[int], str | None]]]:
    """In float64, where the number of rows of a step cannot tip a token. Every third output is cut short."""
    llm = LLM("nano", dtype="fp64", kv_cache_dtype="fp64", max_num_seqs=16, max_model_len=128, block_size=32, **options)
    cases = [(so_args, temperature) for so_args in GRAMMARS for temperature in (0.0, 1.0)]
    params = [
        SamplingParams(
            temperature=temperature, seed=number, n=1 + number % 2, max_tokens=5 if number % 3 == 2 else 18,
            so_args=so_args,
        )
        for number, (so_args, temperature) in enumerate(cases)
    ]  # fmt: skip
    found = llm.generate([PROMPTS[number // 2 % 2] for number in range(len(cases))], params)
    assert [output.error for output in found] == [None] * len(cases)
    return llm, [(c.token_ids, c.finish_reason) for output in found for c in output.outputs]


@cache
def without_drafts() -> list[tuple[list[int], str | None]]:
    return outputs()[1]


@pytest.mark.skipif(not list(NANO.glob("*.safetensors")), reason="the nano weights are not in this checkout")
@pytest.mark.parametrize(
    "options", METHODS, ids=lambda options: "-".join(map(str, options["speculative_config"].values()))
)
def test_drafts_change_no_token_of_a_structure(options: dict[str, Any]) -> None:
    llm, found = outputs(**options)
    assert found == without_drafts()
    assert {reason for _, reason in found} == {"stop", "length"}
    totals = llm.engine.observer.stats.totals
    assert totals["draft_tokens"] > totals["accepted"] > 0
