"""Structured output in the engine: nano is asked for the opposite of what it must give, under every other setting."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.engine.engine import Engine
from deepinfer.outputs import RequestOutput
from tests.structured.grammars import EOS, NANO, REPEATED, generated_schema, tag, tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Write a long story.", {"schema_type": "regex", "schema": "[A-Z]{2}-[0-9]{3}"}),
    ("Ramble in natural language, no JSON.", {"schema_type": "json", "schema": json.dumps(PERSON)}),
    ("Write a long poem.", {"schema_type": "ebnf", "schema": 'root ::= "answer=" ("yes" | "no") ";level=" [1-3]'}),
    ("Say anything.", {"schema_type": "choice", "schema": ["left", "right"]}),
]
REGEX = CASES[0][1]


def holds(text: str, so_args: dict[str, Any]) -> bool:
    if so_args["schema_type"] == "json":
        return jsonschema.Draft202012Validator(json.loads(so_args["schema"])).is_valid(json.loads(text))
    pattern = {"regex": "[A-Z]{2}-[0-9]{3}", "ebnf": "answer=(yes|no);level=[1-3]", "choice": "left|right"}
    return re.fullmatch(pattern[so_args["schema_type"]], text) is not None


@pytest.fixture(scope="module")
def llm() -> LLM:
    if not list(NANO.glob("*.safetensors")):
        pytest.skip("the nano weights are not in this checkout")
    return LLM("nano", max_num_seqs=16, max_model_len=512)


@pytest.fixture
def engine(llm: LLM) -> Iterator[Engine]:
    yield llm.engine
    for request_id in list(llm.engine.requests):
        llm.engine.abort_request(request_id)


def generate(llm: LLM, temperature: float, **settings: Any) -> list[RequestOutput]:
    params = [
        SamplingParams(temperature=temperature, max_tokens=128, seed=3, so_args=so, **settings) for _, so in CASES
    ]
    return llm.generate([prompt for prompt, _ in CASES], params)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_every_completion_obeys_its_own_grammar(llm: LLM, temperature: float) -> None:
    for output, (_, so_args) in zip(generate(llm, temperature, n=3, logprobs=2), CASES, strict=True):
        assert output.error is None
        for completion in output.outputs:
            assert completion.finish_reason == "stop" and completion.token_ids[-1] == EOS
            assert holds(completion.text, so_args), completion.text
            assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
            for item in completion.logprobs:  # the model's own, whatever the grammar made of them
                assert item.top[0][1] >= item.logprob and len(item.top) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_generated_schemas_hold_at_every_temperature(llm: LLM, temperature: float) -> None:
    import random

    schemas = []
    for number in range(1000, 1060):
        schema = generated_schema(random.Random(number))
        try:
            llm.engine.compile({"schema_type": "json", "schema": json.dumps(schema)}).result()
            schemas.append(schema)
        except ValueError:
            pass
    params = [
        SamplingParams(
            temperature=temperature, seed=number, max_tokens=60,
            so_args={"schema_type": "json", "schema": json.dumps(schema)},
        )
        for number, schema in enumerate(schemas)
    ]  # fmt: skip
    prompts = [f"{number} Write prose, no JSON." for number in range(len(schemas))]
    num_complete = 0
    for schema, output in zip(schemas, llm.generate(prompts, params), strict=True):
        completion = output.outputs[0]
        assert output.error is None and completion.finish_reason in ("stop", "length")
        if completion.finish_reason == "stop":
            num_complete += 1
            assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(completion.text)), (
                schema,
                completion.text,
            )
    assert num_complete >= len(schemas) // 3


def test_logprobs_are_those_without_the_grammar(llm: LLM) -> None:
    prompt, so_args = CASES[0]
    plain = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=5))[0].outputs[0]
    bound = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=5, so_args=so_args))[0].outputs[0]
    assert plain.logprobs and bound.logprobs
    assert dict(bound.logprobs[0].top) == pytest.approx(dict(plain.logprobs[0].top), abs=1e-4)
    assert bound.token_ids != plain.token_ids


def test_max_tokens_inside_a_structure_is_length(llm: LLM) -> None:
    output = llm.generate("x", SamplingParams(temperature=0, max_tokens=3, so_args=CASES[1][1]))[0].outputs[0]
    assert output.finish_reason == "length" and len(output.token_ids) == 3 and output.text.startswith("{")


def test_a_stop_string_ends_it_early(llm: LLM) -> None:
    output = llm.generate("x", SamplingParams(temperature=0, max_tokens=60, so_args=REGEX, stop=["-"]))[0].outputs[0]
    assert output.finish_reason == "stop" and output.stop_reason == "-" and re.fullmatch("[A-Z]{2}", output.text)


def test_thinking_first(llm: LLM) -> None:
    """Free generation up to the end of thinking, then the structure."""
    think_end = tokenizer().control_id("think_end")
    messages = [{"role": "user", "content": "How much is 3 + 4?"}]
    params = SamplingParams(temperature=0, max_tokens=300, so_args=REGEX | {"trigger_token_ids": [think_end]})
    completion = llm.chat(messages, params, thinking=True)[0].outputs[0]
    at = completion.token_ids.index(think_end)
    assert at > 3 and completion.finish_reason == "stop"
    assert re.fullmatch("[A-Z]{2}-[0-9]{3}", tokenizer().decode(completion.token_ids[at + 1 : -1]))


def test_a_bound_token_forces_the_trigger(llm: LLM) -> None:
    first = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids
    trigger = tokenizer().encode_text(" RESULT: ")
    so_args = REGEX | {"trigger_token_ids": trigger, "bound_token_id": first[2]}
    params = SamplingParams(temperature=0, max_tokens=60, so_args=so_args)
    token_ids = llm.generate("Once upon a time", params)[0].outputs[0].token_ids
    assert token_ids[: 3 + len(trigger)] == [*first[:3], *trigger]
    assert re.fullmatch("[A-Z]{2}-[0-9]{3}", tokenizer().decode(token_ids[3 + len(trigger) : -1]))


def test_other_settings_that_choose_tokens(llm: LLM) -> None:
    letters = [i for i in range(8192) if re.fullmatch(rb"[A-F]|[0-9]|-", tokenizer().bytes_of(i))]
    params = SamplingParams(temperature=1, max_tokens=60, seed=1, so_args=REGEX, allowed_token_ids=[*letters, EOS], n=4)
    for completion in llm.generate("x", params)[0].outputs:
        assert re.fullmatch("[A-F]{2}-[0-9]{3}", completion.text)
    banned = tokenizer().encode_text("left")
    params = SamplingParams(
        temperature=1, max_tokens=60, seed=1, so_args=CASES[3][1], bad_words_token_ids=[[banned[0]]], n=4
    )
    assert {c.text for c in llm.generate("x", params)[0].outputs} <= {"left", "right"}
    digit = tokenizer().encode_text("7")[0]
    params = SamplingParams(temperature=0, max_tokens=60, logit_bias={digit: 100.0}, so_args=REGEX)
    assert llm.generate("x", params)[0].outputs[0].text.count("7") >= 1


@pytest.mark.parametrize(
    "settings",
    [{"allowed_token_ids": [5, 6]}, {"min_tokens": 40}, {"bad_words_token_ids": [[i] for i in range(8192) if i != 5]}],
    ids=["allowed_token_ids", "min_tokens", "bad_words"],
)
def test_when_nothing_is_left_the_request_ends_with_an_error_and_no_other(llm: LLM, settings: dict[str, Any]) -> None:
    prompts = ["x", "x", "y"]
    bad = SamplingParams(temperature=1, max_tokens=60, seed=1, so_args=REGEX, **settings)
    good = SamplingParams(temperature=0, max_tokens=60, so_args=REGEX)
    outputs = llm.generate(prompts, [good, bad, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)])
    assert outputs[1].error is not None and "no token is left" in outputs[1].error
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[0].error is None and holds(outputs[0].outputs[0].text, REGEX)
    assert outputs[2].error is None and len(outputs[2].outputs[0].token_ids) == 30
    assert not llm.engine.has_unfinished_requests()


def test_a_grammar_that_becomes_too_complex_leaves_what_was_written(llm: LLM) -> None:
    """What no library can go on with ends as if max_tokens had come; its siblings and the others go on."""
    elements = [{"type": "regex", "pattern": "[0-9]{60}"}, REPEATED]
    node = {
        "type": "or",
        "elements": [{"type": "sequence", "elements": elements}, {"type": "regex", "pattern": "[a-c]{9}"}],
    }
    so_args = tag(node)
    digits = [i for i in range(8192) if re.fullmatch(rb"[0-9]", tokenizer().bytes_of(i))]
    bias = dict.fromkeys(digits, 6.0)
    params = SamplingParams(temperature=1, max_tokens=200, seed=1, so_args=so_args, n=6, logit_bias=bias)
    outputs = llm.generate(["x", "y"], [params, SamplingParams(temperature=0, max_tokens=60, so_args=REGEX)])
    assert outputs[0].error is None and outputs[1].error is None and holds(outputs[1].outputs[0].text, REGEX)
    cut = [c for c in outputs[0].outputs if c.finish_reason == "length"]
    assert 0 < len(cut) < 6
    for completion in outputs[0].outputs:
        if completion in cut:
            assert completion.stop_reason == "grammar_limit" and re.fullmatch("[0-9]{60}a?", completion.text)
        else:
            assert completion.finish_reason == "stop" and re.fullmatch("[a-c]{9}", completion.text)
    assert not llm.engine.has_unfinished_requests()


def test_one_bad_grammar_names_its_prompt_and_nothing_runs(llm: LLM) -> None:
    bad = SamplingParams(so_args={"schema_type": "regex", "schema": "("})
    with pytest.raises(ValueError, match="^prompt 1: so_args.schema"):
        llm.generate(["a", "b"], [SamplingParams(max_tokens=2), bad])
    assert not llm.engine.has_unfinished_requests()


def test_a_model_without_text_refuses(llm: LLM) -> None:
    grammars, llm.engine.grammars = llm.engine.grammars, None
    try:
        with pytest.raises(ValueError, match="so_args needs a tokenizer"):
            llm.generate("x", SamplingParams(so_args=REGEX))
    finally:
        llm.engine.grammars = grammars


@pytest.mark.parametrize("drafts", [False, True])
def test_masks_are_filled_while_the_model_runs(llm: LLM, drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a step's tokens are drawn, grammars have read those of the step in front: on a CPU, during the forward."""
    config = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}} if drafts else {}
    engine = LLM("nano", max_num_seqs=4, max_model_len=128, **config).engine
    run, num_read = engine.runner.run, []

    def slow_run(inputs: Any) -> Any:
        logits = run(inputs)
        sequences = [seq for request in engine.requests.values() for seq in request.sequences]
        end = time.monotonic() + 20
        while any(seq.constraint._unread for seq in sequences) and time.monotonic() < end:
            time.sleep(0.001)
        num_read.append(all(not seq.constraint._unread for seq in sequences))
        return logits

    monkeypatch.setattr(engine.runner, "run", slow_run)
    for number in range(3):
        engine.add_request(str(number), [5, 6, 7], SamplingParams(temperature=0, max_tokens=9, so_args=REGEX))
    while engine.has_unfinished_requests():
        assert all(output.error is None for output in engine.step())
    assert len(num_read) > 3 and all(num_read)


OPTIONS: dict[str, dict[str, Any]] = {
    "preemption": {"num_blocks": 6, "max_num_seqs": 8, "block_size": 32, "max_model_len": 150},
    "swap": {"num_blocks": 6, "max_num_seqs": 8, "block_size": 32, "max_model_len": 150, "preemption_mode": "swap"},
    "overlap": {"zero_overhead_scheduling": True, "max_num_seqs": 8},
    "speculation": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "max_num_seqs": 8},
    "speculation and overlap": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "zero_overhead_scheduling": True,
        "max_num_seqs": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_same_tokens_however_the_engine_runs(llm: LLM, name: str) -> None:
    """Preemption and swapping keep the grammar's place; overlap and speculation change no token."""
    wanted = {key: value for key, value in OPTIONS[name].items() if key in type(llm.engine.config).__dataclass_fields__}
    if wanted.keys() != OPTIONS[name].keys():
        pytest.skip(f"this engine has no {sorted(OPTIONS[name].keys() - wanted.keys())}")
    other = LLM("nano", **wanted)
    array = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 999},
        "minItems": 12,
        "maxItems": 14,
    }
    cases = [*CASES, ("List numbers.", {"schema_type": "json", "schema": json.dumps(array)})] * 2
    params = [
        SamplingParams(temperature=1.0 if number % 2 else 0.0, seed=number, max_tokens=120, so_args=so_args)
        for number, (_, so_args) in enumerate(cases)
    ]
    # Each fills most of a block, so that all of them need another one while they decode.
    prompts = [(28 * tokenizer().encode_text(prompt))[:28] for prompt, _ in cases]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    found = other.generate(prompts, params)
    assert [output.error for output in found] == [None] * len(cases)
    assert [output.outputs[0].token_ids for output in found] == expected
    if name in ("preemption", "swap"):
        assert other.engine.scheduler.num_preemptions > 0


def test_a_grammar_that_is_there_is_not_compiled_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when the cache has lost it meanwhile: the engine's thread would wait."""
    so_args = {"schema_type": "choice", "schema": ["only", "here"]}
    grammar = engine.compile(so_args)
    grammar.result(timeout=60)
    monkeypatch.setattr(engine, "compile", None)
    engine.add_request("compiled", [5, 6, 7], SamplingParams(max_tokens=4, so_args=so_args), grammar)
    assert engine.abort_request("compiled") is not None
