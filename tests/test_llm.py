"""The offline API over a tiny random checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.recipe import encode_prompt, render_chat
from tests.checkpoints import write_tiny_checkpoint
from tests.engine.test_engine_workloads import assert_idle, make_engine
from tests.engine.toy_model import ToyRunner

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """In float64, so that an answer does not depend on the batch it was made in."""
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    return LLM(path, max_num_seqs=8, max_model_len=512, dtype="fp64", kv_cache_dtype="fp64")


def test_text_and_token_prompts_give_the_same_answer_in_order(llm: LLM) -> None:
    text = "Once upon a time"
    bos = llm.tokenizer.control_id("bos")
    ids = [bos, *llm.tokenizer.encode_text(text)]
    other = [bos, *llm.tokenizer.encode_text("def main():")]
    by_text, by_ids, last = llm.generate([text, ids, other], [GREEDY, GREEDY, SamplingParams(max_tokens=3, seed=1)])
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == ids and last.prompt_token_ids == other
    assert by_text.outputs == by_ids.outputs
    completion = by_text.outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (12, "length")
    assert completion.text == llm.tokenizer.decode(t for t in completion.token_ids if t not in silent(llm))
    assert llm.generate(text, GREEDY)[0].outputs == llm.generate(ids, GREEDY)[0].outputs == by_text.outputs
    assert llm.generate([]) == []


def silent(llm: LLM) -> set[int]:
    return {llm.tokenizer.control_id(role) for role in ("bos", "eos")}


def test_several_completions_come_in_order_with_their_own_text(llm: LLM) -> None:
    output = llm.generate("Hello", SamplingParams(n=4, seed=3, max_tokens=10, ignore_eos=True, logprobs=2))[0]
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    for completion in output.outputs:
        assert completion.logprobs is not None
        assert [entry.token_id for entry in completion.logprobs] == completion.token_ids


@pytest.mark.parametrize("length", [1, 3, 6])
def test_stop_string_cuts_text_and_tokens(llm: LLM, length: int) -> None:
    """A stop string out of the middle of the free answer, of several lengths, also across tokens."""
    free = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0].outputs[0]
    stop = free.text[10 : 10 + length]
    first = free.text.index(stop)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop, n=2)
    output = llm.generate("Hello", params)[0]
    assert output.finished and len(output.outputs) == 2
    for completion in output.outputs:
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (free.text[:first], "stop", stop)
        count = len(completion.token_ids)
        assert completion.token_ids == free.token_ids[:count] and count < 40
        assert stop in llm.tokenizer.decode(completion.token_ids)
        assert stop not in llm.tokenizer.decode(completion.token_ids[:-1])
    assert_idle(llm.engine)


def test_tokens_beyond_the_tokenizer_have_no_text(llm: LLM) -> None:
    engine = Engine(ToyRunner(40, 4, 64, vocab_size=1000), EngineConfig(block_size=4, num_blocks=40))
    golden = [*llm.tokenizer.encode_text("Hello"), 999, *llm.tokenizer.encode_text(" there")]
    output = LLM.from_engine(engine, llm.tokenizer).generate("Hi", SamplingParams(golden_token_ids=golden))[0]
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("Hello there", golden)


def test_bad_input_names_the_prompt_and_runs_nothing(llm: LLM) -> None:
    before = llm.engine.stats()
    for prompts, message in (
        (["fine", [10**9]], "prompt 1: prompt_token_ids"),
        (["fine", ""], "prompt 1: prompts must not be empty"),
        (["fine", [1] * 600], "prompt 1: prompt_token_ids has 600 tokens"),
        ("x" * 9000, "prompt_token_ids has"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, GREEDY)
    with pytest.raises(ValueError, match="sampling_params must be one or 2, got 1"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm.engine.stats() == before


@pytest.mark.parametrize("text", ["\ud800", "a" * 9000 + "\udfff", "caf\udce9"])
def test_a_lone_surrogate_is_no_text(llm: LLM, text: str) -> None:
    where = len(text) - 1
    with pytest.raises(ValueError, match=rf"^prompts: text must be Unicode, character {where} is a lone surrogate$"):
        llm.generate(text, GREEDY)
    with pytest.raises(ValueError, match=r"^prompt 1: prompts: text must be Unicode"):
        llm.generate(["fine", text], GREEDY)
    with pytest.raises(ValueError, match=rf"^text must be Unicode, character {where} "):
        llm.tokenizer.encode_texts(["fine", text])
    assert_idle(llm.engine)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_tokens_that_leave_nothing_to_generate_are_refused(llm: LLM, ignore_eos: bool) -> None:
    """With one token left it is generated until min_tokens, whatever the logits say."""
    every, left = range(512), 77
    eos = llm.tokenizer.control_id("eos")
    banned = every if ignore_eos else [token_id for token_id in every if token_id != eos]
    options = {"ignore_eos": ignore_eos, "temperature": 0, "min_tokens": 3, "max_tokens": 5}
    with pytest.raises(ValueError, match="^stop_token_ids must leave a token to generate before min_tokens = 3"):
        llm.generate("Hello", SamplingParams(stop_token_ids=banned, **options))
    stops = [token_id for token_id in every if token_id != left]
    output = llm.generate("Hello", SamplingParams(stop_token_ids=stops, **options))[0]
    assert output.error is None and output.outputs[0].token_ids[:3] == [left] * 3
    without = SamplingParams(stop_token_ids=every, temperature=0, max_tokens=5)
    assert llm.generate("Hello", without)[0].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("penalty", [0.01, 100])
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_most_extreme_penalties_finish(llm: LLM, penalty: float, temperature: float) -> None:
    bias = dict.fromkeys(range(512), -100)
    params = SamplingParams(
        repetition_penalty=penalty, temperature=temperature, seed=1, max_tokens=8, ignore_eos=True, logit_bias=bias
    )
    output = llm.generate("Hello Hello", params)[0]
    assert output.error is None and len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize("prompts", [{1}, (5 for _ in [0]), {"a": 1}, [[5], {"a": 1}], [{5}], 1.5])
def test_what_is_neither_a_prompt_nor_a_list_of_them_is_refused(llm: LLM, prompts: object) -> None:
    with pytest.raises(ValueError, match="^prompt"):
        llm.generate(prompts, GREEDY)
    with pytest.raises(ValueError, match="^sampling_params must be"):
        llm.generate(["a"], 5)
    assert_idle(llm.engine)


@pytest.mark.parametrize("prompts", [5, None, 1.5, b"bytes", {"text": "a"}, [None], [5.0], [[1.0]], [["a"]], [True]])
def test_prompts_of_a_wrong_type_are_refused_by_name(llm: LLM, prompts: object) -> None:
    with pytest.raises(ValueError, match="^prompt"):
        llm.generate(prompts, GREEDY)
    assert_idle(llm.engine)


@pytest.mark.parametrize("params", [3, "greedy", {"temperature": 0}, [3], [{"temperature": 0}]])
def test_sampling_params_of_a_wrong_type_are_refused_by_name(llm: LLM, params: object) -> None:
    with pytest.raises(ValueError, match="^sampling_params must be"):
        llm.generate("a", params)
    assert_idle(llm.engine)


def test_bad_model_and_options() -> None:
    with pytest.raises(ValueError, match="model must be 'nano' or a local folder"):
        LLM("/nowhere/at/all")
    with pytest.raises(ValueError, match="unknown engine option max_seqs"):
        LLM("nano", max_seqs=4)
    with pytest.raises(ValueError, match="either config or engine options"):
        LLM("nano", EngineConfig(), max_num_seqs=4)
    with pytest.raises(ValueError, match="max_num_seqs"):
        LLM("nano", max_num_seqs=0)


def test_without_a_tokenizer_token_ids_only() -> None:
    engine = make_engine(4, 40, 4, 16, 64)
    llm = LLM.from_engine(engine)
    output = llm.generate([[1, 2], [3]], GREEDY, progress=True)[1].outputs[0]
    assert (len(output.token_ids), output.text) == (12, "")
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        llm.generate([1], SamplingParams(stop="x"))


def test_a_failed_step_is_reported_and_the_others_finish() -> None:
    engine = make_engine(4, 40, 1, 16, 64)
    engine.runner.poison = 50
    mild = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={50: -100})
    good, bad, last = LLM.from_engine(engine).generate([[1], [50], [2]], mild)
    assert bad.error == "RuntimeError: poisoned token" and bad.outputs[0].finish_reason == "error"
    assert len(good.outputs[0].token_ids) == len(last.outputs[0].token_ids) == 4


def test_an_interrupt_leaves_an_idle_engine(tmp_path: Path) -> None:
    engine = make_engine(4, 40, 4, 16, 64)
    llm = LLM.from_engine(engine)
    run, calls = engine.runner.run, iter(range(10))

    def interrupted(inputs):
        if next(calls) == 4:
            raise KeyboardInterrupt
        return run(inputs)

    engine.runner.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], GREEDY)
    assert_idle(engine)
    engine.runner.run = run
    assert len(llm.generate([1], GREEDY)[0].outputs[0].token_ids) == 12


def test_chat_is_generate_over_the_rendered_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    first: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    second: list[Any] = [{"role": "user", "content": "how are you?"}]
    assert llm.tokenizer is not None
    prompts = [encode_prompt(render_chat(one, thinking=True), llm.tokenizer) for one in (first, second)]
    expected = llm.generate(prompts, params)
    found = llm.chat([first, second], params, thinking=True)
    assert [one.prompt_token_ids for one in found] == prompts
    assert [one.outputs[0].text for one in found] == [one.outputs[0].text for one in expected]
    (alone,) = llm.chat(first, params, thinking=True)
    assert alone.outputs[0].token_ids == expected[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("messages", "options", "needle"),
    [
        ("hi", {}, "messages must be"),
        ([{"role": "nobody", "content": "hi"}], {}, "messages"),
        ([[{"role": "user", "content": "hi"}], [{"role": "user", "content": 5}]], {}, "conversation 1: messages"),
        ([{"role": "user", "content": "hi"}], {"tools": [{"type": "x"}]}, "tools"),
    ],
)
def test_a_bad_conversation_is_named(llm: LLM, messages: Any, options: dict[str, Any], needle: str) -> None:
    with pytest.raises(ValueError, match=needle):
        llm.chat(messages, **options)


def test_chat_needs_a_tokenizer() -> None:
    llm = LLM.from_engine(make_engine(4, 40, 4, 16, 64))
    with pytest.raises(ValueError, match="need a tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])
