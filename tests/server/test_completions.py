"""/v1/completions against the offline engine on the same checkpoint."""

import asyncio
from pathlib import Path

import pytest

from deepinfer import LLM, SamplingParams
from tests.server.process import MODEL, Server, lines_of

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, max_num_seqs=16)


@pytest.fixture(scope="module")
def greedy(llm: LLM) -> str:
    """What the model writes after PROMPT."""
    return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=48))[0].outputs[0].text


def test_answer_equals_the_offline_engine(server: Server, llm: LLM) -> None:
    answer = server.client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=48, extra_body={"return_token_ids": True}
    )
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=48))[0]
    choice = answer.choices[0]
    assert choice.text == expected.outputs[0].text
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == expected.outputs[0].token_ids
    assert choice.model_extra["prompt_token_ids"] == expected.prompt_token_ids
    assert choice.finish_reason == "length"
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (48, 48 + len(expected.prompt_token_ids))


def test_stream_equals_the_whole_answer(server: Server, greedy: str) -> None:
    stream = server.client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=48, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == greedy
    assert len(chunks) > 4, "the answer came as one lump"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 48
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_is_streamed_only_when_asked_for(server: Server) -> None:
    with server.http.stream(
        "POST", "/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "stream": True}
    ) as answer:
        lines = [line for line in lines_of(answer) if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]" and not any('"usage"' in line for line in lines)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("start", "length"), [(5, 1), (9, 4), (20, 7), (12, 2)])
def test_stop_string_ends_the_text_before_it(
    server: Server, greedy: str, start: int, length: int, stream: bool
) -> None:
    stop = greedy[start : start + length]
    answer = server.client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=48, stop=[stop, "never written"], stream=stream
    )
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == greedy[: greedy.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].model_extra["stop_reason"] == stop


def test_nothing_is_counted_behind_a_stop_string(server: Server, greedy: str) -> None:
    whole = server.client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=48, logprobs=0)
    stopped = server.client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=48, logprobs=0, stop=greedy[20:23],
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    choice = stopped.choices[0]
    count = len(choice.model_extra["token_ids"])
    assert stopped.usage.completion_tokens == len(choice.logprobs.tokens) == count < 48
    assert choice.logprobs.tokens == whole.choices[0].logprobs.tokens[:count]


def test_prompts_of_every_kind(server: Server, llm: LLM) -> None:
    """Text, token IDs and lists of both; choices are numbered prompt by prompt."""
    token_ids = [0, 40, 41, 42]
    params = SamplingParams(temperature=0, max_tokens=8)
    expected_text, expected_ids = (one.outputs[0].text for one in llm.generate([PROMPT, token_ids], params))

    def texts(prompt: object, n: int = 1) -> list[str]:
        answer = server.client.completions.create(
            model=MODEL,
            prompt=prompt,
            temperature=0,
            max_tokens=8,
            n=n,  # type: ignore[arg-type]
        )
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    assert texts(PROMPT) == [expected_text]
    assert texts(token_ids) == [expected_ids]
    assert texts([PROMPT, "Other"])[0] == expected_text
    assert texts([token_ids, [0, 50]])[0] == expected_ids
    assert texts([PROMPT, PROMPT], n=2) == [expected_text] * 4


def test_usage_counts_each_prompt_once(server: Server) -> None:
    answer = server.client.completions.create(model=MODEL, prompt=[[0, 50, 51], [0, 50]], max_tokens=4, n=3)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens <= 2 * 3 * 4


def test_echo_repeats_the_prompt(server: Server, llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text
    for stream in (False, True):
        answer = server.client.completions.create(
            model=MODEL, prompt=PROMPT, temperature=0, max_tokens=4, echo=True, stream=stream
        )
        chunks = list(answer) if stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + expected


def test_seed_repeats_and_choices_differ(server: Server) -> None:
    def draw(seed: int) -> list[str]:
        answer = server.client.completions.create(model=MODEL, prompt=PROMPT, seed=seed, n=3, max_tokens=12)
        return [choice.text for choice in answer.choices]

    first = draw(7)
    assert first == draw(7) != draw(8)
    assert len(set(first)) == 3


def test_logprobs(server: Server, llm: LLM) -> None:
    answer = server.client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=6, logprobs=3)
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6, logprobs=3))[0].outputs[0].logprobs
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and expected is not None
    assert logprobs.token_logprobs == pytest.approx([item.logprob for item in expected], abs=1e-5)
    assert logprobs.top_logprobs is not None and logprobs.tokens is not None
    for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert len(top) in (3, 4) and token in top  # the chosen one is there, too
    assert logprobs.text_offset is not None and logprobs.tokens is not None
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:i])) for i in range(6)]


def test_min_tokens_stop_token_ids_and_bias(server: Server) -> None:
    """A stop token that the bias forces ends the answer, but not before min_tokens."""
    forced = {"logit_bias": {"42": 100}, "stop_token_ids": [42], "temperature": 0}
    answer = server.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=20, extra_body={**forced, "return_token_ids": True}
    )
    choice = answer.choices[0]
    assert choice.model_extra is not None and choice.model_extra["token_ids"] == [42]
    assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", 42)
    late = server.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=20, extra_body={**forced, "min_tokens": 5}
    )
    assert late.usage is not None and late.usage.completion_tokens == 6


def test_unlimited_answers_end_with_the_context(server: Server) -> None:
    prompt = [0] + [50] * 1000
    answer = server.client.completions.create(
        model=MODEL, prompt=prompt, extra_body={"ignore_eos": True, "stop_token_ids": []}
    )
    assert answer.usage is not None and answer.usage.total_tokens == 1024
    assert answer.choices[0].finish_reason == "length"


def test_parallel_requests_do_not_disturb_each_other(server: Server, llm: LLM) -> None:
    prompts = [f"Request number {number}" for number in range(24)]
    expected = [one.outputs[0].text for one in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16))]

    async def one(client, prompt: str, stream: bool) -> str:  # type: ignore[no-untyped-def]
        answer = await client.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=16, stream=stream
        )
        if not stream:
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def all_of_them() -> list[str]:
        async with server.async_client as client:
            return await asyncio.gather(*(one(client, prompt, i % 2 == 0) for i, prompt in enumerate(prompts)))

    assert asyncio.run(all_of_them()) == expected


def test_render_shows_the_prompts(server: Server, llm: LLM) -> None:
    body = {"model": MODEL, "prompt": [PROMPT, "<think>"]}
    rendered = server.http.post("/v1/completions/render", json=body).json()["prompts"]
    assert llm.tokenizer is not None
    for text, prompt in zip(body["prompt"], rendered, strict=True):
        assert prompt["token_ids"] == [0, *llm.tokenizer.encode_text(text)]
        assert prompt["prompt"] == "<｜begin▁of▁sentence｜>" + text
    bad = server.http.post("/v1/completions/render", json={"model": MODEL, "prompt": [9999]})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "prompt"


def test_force_topk_and_golden_token_ids(server: Server, llm: LLM) -> None:
    """This engine's own fields, which vLLM's clients send as extras."""
    golden = [7, 300, 41]
    body = {"golden_token_ids": golden, "return_token_ids": True}
    answer = server.client.completions.create(model=MODEL, prompt=PROMPT, logprobs=2, extra_body=body)
    expected = llm.generate(PROMPT, SamplingParams(golden_token_ids=golden, logprobs=2))[0].outputs[0]
    choice = answer.choices[0]
    assert choice.model_extra is not None and choice.model_extra["token_ids"] == golden
    assert choice.logprobs is not None and expected.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx([item.logprob for item in expected.logprobs], abs=1e-4)
    answer = server.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=5, logprobs=2, temperature=1, extra_body={"force_topk": 1}
    )
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [0.0] * 5  # the softmax has one token left
    for wrong in ({"force_topk": 0}, {"golden_token_ids": []}, {"golden_token_ids": [10**9]}):
        reply = server.http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, **wrong})
        assert reply.status_code == 400 and next(iter(wrong)) in reply.json()["error"]["message"]
