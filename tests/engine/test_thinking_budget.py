"""thinking_token_budget: reasoning ends where it should, whatever would come next, with drafts and without."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.params import SamplingParams
from tests.engine.test_engine_workloads import EOS
from tests.engine.test_everything_at_once import outcomes
from tests.engine.test_overlap import Arrival
from tests.engine.test_speculation import Setting, make_engine, run, speculative_settings, texts_of
from tests.engine.toy_grammar import REGEXES, compiler, text_of
from tests.engine.toy_model import VOCAB_SIZE, greedy_oracle

ROOMY = Setting(0, False, False, False, 100, 4, 16, 0.0, 0)
tokens = st.integers(0, VOCAB_SIZE - 1)


def budgeted(prompt: list[int], params: SamplingParams) -> list[int]:
    """The greedy output as the definition says: thoughts, what is forced if they have no end, and what follows."""
    budget, ends = params.thinking_token_budget, list(params.thinking_end_token_ids)
    assert budget is not None and params.max_tokens is not None
    free, _, _ = greedy_oracle(prompt, params, EOS, 396)
    if ends[-1] in free[:budget] or len(free) <= budget:
        return free
    output: list[int] = []
    for token in [*free[:budget], *ends]:
        output.append(token)
        if len(output) == params.max_tokens or (token in EOS and not params.ignore_eos):
            return output
    left = replace(params, max_tokens=params.max_tokens - len(output))
    return output + greedy_oracle(prompt + output, left, EOS, 396)[0]


@st.composite
def thinkers(draw: st.DrawFn, greedy: bool) -> Arrival:
    params = SamplingParams(
        max_tokens=draw(st.integers(1, 25)),
        temperature=0.0 if greedy else draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 2**31)),
        thinking_token_budget=draw(st.integers(0, 20)),
        thinking_end_token_ids=draw(st.lists(tokens, min_size=1, max_size=3)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 2])),
    )
    return Arrival(draw(st.integers(0, 20)), draw(st.lists(tokens, min_size=1, max_size=30)), params)


@settings(max_examples=25, deadline=None)
@given(workload=st.lists(thinkers(greedy=True), min_size=1, max_size=5))
def test_reasoning_ends_as_the_definition_says(workload: list[Arrival]) -> None:
    for number, output in run(make_engine(ROOMY, None), workload).items():
        arrival = workload[int(number)]
        assert output.outputs[0].token_ids == budgeted(arrival.prompt, arrival.params)


@settings(max_examples=25, deadline=None)
@given(workload=st.lists(thinkers(greedy=False), min_size=1, max_size=5), setting=speculative_settings)
def test_overlap_drafts_and_preemption_change_nothing(workload: list[Arrival], setting: Setting) -> None:
    plain = run(make_engine(ROOMY, None), workload)
    assert outcomes(run(make_engine(setting, texts_of(workload, plain)), workload)) == outcomes(plain)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_grammar_begins_behind_the_forced_end(drafts: bool) -> None:
    so_args = {"schema_type": "regex", "schema": REGEXES[0], "trigger_token_ids": [60]}
    params = SamplingParams(
        temperature=1.0, max_tokens=40, logit_bias={60: -100.0}, so_args=so_args,
        thinking_token_budget=6, thinking_end_token_ids=[9, 60],
    )  # fmt: skip
    workload = [Arrival(0, [5, number], replace(params, seed=number)) for number in range(12)]

    def outputs(setting: Setting, texts: list[list[int]] | None) -> dict:
        engine = make_engine(setting, texts)
        engine.grammars = compiler()
        return run(engine, workload)

    got = outputs(ROOMY, None)
    if drafts:
        got, plain = outputs(Setting(4, True, True, True, 30, 4, 16, 0.8, 1), texts_of(workload, got)), got
        assert outcomes(got) == outcomes(plain)
    structured = 0
    for output in got.values():
        token_ids = output.outputs[0].token_ids
        if len(token_ids) > 6:  # else it ended while it thought
            assert token_ids[6:8] == [9, 60] and set(text_of(token_ids[8:])) <= set("abc")
            structured += 1
    assert structured > 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"thinking_token_budget": 5}, "needs thinking_end_token_ids"),
        ({"golden_token_ids": [4]}, "golden_token_ids"),
        ({"so_args": {"schema_type": "json_object"}}, "so_args"),
        ({"so_args": {"schema_type": "json_object", "trigger_token_ids": [8, 6]}}, "so_args"),
        ({"so_args": {"schema_type": "json_object", "trigger_token_ids": [7], "bound_token_id": 6}}, "so_args"),
    ],
)
def test_what_contradicts_it_is_refused(given: dict, message: str) -> None:
    if "thinking_token_budget" not in given:
        given |= {"thinking_token_budget": 5, "thinking_end_token_ids": [6, 7]}
    with pytest.raises(ValueError, match=f"thinking_token_budget.*{message}"):
        SamplingParams(**given)


def test_a_grammar_that_begins_behind_the_end_is_accepted() -> None:
    for trigger in ({"trigger_token_ids": [7]}, {"trigger_token_ids": [3, 4], "bound_token_id": 7}):
        SamplingParams(
            so_args={"schema_type": "json_object", **trigger}, thinking_token_budget=5, thinking_end_token_ids=[6, 7]
        )
