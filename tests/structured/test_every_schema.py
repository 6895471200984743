"""Every schema that is accepted, through the engine: what nano completes validates, at any temperature."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams
from tests.structured.grammars import EOS, NANO, generated_schema, tokenizer
from tests.structured.test_json_schema import SUITE, compiled_json, validator

BATCH = 32


@cache
def accepted() -> list[tuple[Any, Any]]:
    """(schema, its judge) of the JSON Schema Test Suite, and of 200 random schemas."""
    cases = [(case["schema"], case["draft"]) for case in SUITE]
    cases += [(generated_schema(random.Random(number)), "draft2020-12") for number in range(200)]
    found = []
    for schema, draft in cases:
        try:
            compiled_json(schema)
        except ValueError:
            continue
        if "\\p{" not in json.dumps(schema):  # Python's re, which the judge uses, has no such classes
            found.append((schema, validator(schema, draft)))
    return found


@pytest.fixture(scope="module")
def llm() -> LLM:
    if not list(NANO.glob("*.safetensors")):
        pytest.skip("the nano weights are not in this checkout")
    return LLM("nano", max_num_seqs=BATCH, max_model_len=512)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_every_completed_output_validates(llm: LLM, temperature: float) -> None:
    """Nano is asked for prose; a bias towards what closes a value, 0, 5 or 10, lets most end."""
    closing = [EOS, *(tokenizer().encode_text(text)[0] for text in ('"', "}", "]", '"}', '"]'))]
    cases = accepted()
    assert len(cases) > 390
    prompts = [f"{number} Write prose, no JSON." for number in range(len(cases))]
    params = [
        SamplingParams(
            temperature=temperature, seed=number, max_tokens=80,
            logit_bias=dict.fromkeys(closing, number % 3 * 5.0),
            so_args={"schema_type": "json", "schema": json.dumps(schema)},
        )
        for number, (schema, _) in enumerate(cases)
    ]  # fmt: skip
    reasons = {"stop": 0, "length": 0}
    for (schema, judge), output in zip(cases, llm.generate(prompts, params), strict=True):
        (completion,) = output.outputs
        assert output.error is None, (schema, output.error)
        reasons[completion.finish_reason] += 1
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] == EOS
            assert judge.is_valid(json.loads(completion.text)), (schema, completion.text)
        else:
            assert len(completion.token_ids) == 80 and completion.token_ids[-1] != EOS
    print(f"temperature {temperature}: {reasons}")
    assert reasons["stop"] > 0.7 * len(cases)
