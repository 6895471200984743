"""Structured output on a GPU: masks filled beside a running step and applied on the device, with graphs and drafts."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
import torch

from deepinfer import LLM, SamplingParams
from tests.structured.grammars import EOS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# A step of another number of rows may differ in its last bits, which FP8 and FP4 rows would turn into other codes.
EXACT: dict[str, Any] = {"dtype": "fp32", "kv_cache_dtype": "fp32", "quantize_activations": False}
ITEM = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": ITEM, "minItems": 2, "maxItems": 3}
GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"schema_type": "regex", "schema": "[A-Z]{2}-[0-9]{3}( (left|right))*"}, "[A-Z]{2}-[0-9]{3}( (left|right))*"),
    ({"schema_type": "ebnf", "schema": 'root ::= "[" ([0-9] | root) "]"'}, r"\[+[0-9]\]+"),
    ({"schema_type": "choice", "schema": ["left", "right", "left and right"]}, "left|right|left and right"),
    (
        {"schema_type": "json", "schema": json.dumps(LIST)},
        r'\[(, )?(\{"kind": "(red|blue)", "count": \d+\}(, )?){2,3}\]',
    ),
]


def generate(**options: Any) -> list[tuple[int, list[int], str, str | None]]:
    """(number of the grammar, tokens, text, finish reason) of 64 completions of 32 requests; others run beside them."""
    llm = LLM("nano", device="cuda", max_num_seqs=48, max_model_len=256, **EXACT, **options)
    numbers = [number % len(GRAMMARS) for number in range(32)]
    params = [
        SamplingParams(temperature=number // 4 % 3, seed=number, n=2, max_tokens=60, so_args=GRAMMARS[kind][0])
        for number, kind in enumerate(numbers)
    ]
    free = SamplingParams(temperature=1, seed=1, max_tokens=60, ignore_eos=True)
    prompts = [f"{number} red, blue, red, blue, red," for number in range(40)]
    outputs = llm.generate(prompts, [*params, *[free] * 8])
    assert [output.error for output in outputs] == [None] * 40
    assert all(len(output.outputs[0].token_ids) == 60 for output in outputs[32:])
    return [
        (kind, c.token_ids, c.text, c.finish_reason)
        for kind, output in zip(numbers, outputs, strict=False)
        for c in output.outputs
    ]


@cache
def one_by_one() -> list[tuple[int, list[int], str, str | None]]:
    return generate(zero_overhead_scheduling=False, cuda_graphs=False)


def test_outputs_obey_at_every_temperature() -> None:
    num_complete = 0
    for kind, token_ids, text, reason in one_by_one():
        assert reason in ("stop", "length")
        if reason == "stop":
            num_complete += 1
            assert token_ids[-1] == EOS and re.fullmatch(GRAMMARS[kind][1], text), text
    assert num_complete > 40


@pytest.mark.parametrize(
    "options",
    [{}, *({"speculative_config": {"method": method, "num_speculative_tokens": 3}} for method in ("ngram", "dspark"))],
    ids=["overlap and graphs", "ngram", "dspark"],
)
def test_same_tokens_however_it_runs(options: dict[str, Any]) -> None:
    assert generate(**options) == one_by_one()
