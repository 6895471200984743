"""Log-probabilities of prompts, as evaluation tools ask for them, against those of the same tokens when generated."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.process import MODEL, Server, lines_of
from tests.server.test_errors import check_shape

PROMPT = [0, 50, 51, 52, 7, 300, 301, 9, 12, 44]
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 1}
BY_ID = {"return_tokens_as_token_ids": True}


def ask(server: Server, path: str = "/v1/completions", **change: Any) -> Any:
    answer = server.http.post(path, json=BODY | change)
    assert answer.status_code == 200, answer.text
    return answer.json()


def close(values: list[float | None]) -> Any:
    assert None not in values
    return pytest.approx(values, abs=2e-4)


@pytest.fixture(scope="module")
def generated(server: Server) -> dict[str, Any]:
    """The tokens of the prompt behind its first one, when the engine is made to choose them."""
    forced = {"prompt": PROMPT[:1], "golden_token_ids": PROMPT[1:], "max_tokens": None}
    choice = ask(server, logprobs=3, **forced, **BY_ID)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in PROMPT[1:]]
    return choice["logprobs"]


def check_echo(logprobs: dict[str, Any], generated: dict[str, Any], num_generated: int) -> None:
    assert len(logprobs["tokens"]) == len(PROMPT) + num_generated
    assert logprobs["tokens"][1 : len(PROMPT)] == generated["tokens"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(PROMPT)] == close(generated["token_logprobs"])
    for top, expected in zip(logprobs["top_logprobs"][1:], generated["top_logprobs"], strict=False):
        assert top.keys() == expected.keys() and list(top.values()) == close(list(expected.values()))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_with_logprobs(server: Server, generated: dict[str, Any], max_tokens: int, n: int) -> None:
    """What lm-eval asks for: it takes the entries between its context and the last token."""
    answer = ask(server, echo=True, logprobs=3, max_tokens=max_tokens, ignore_eos=True, n=n, **BY_ID)
    assert answer["usage"]["completion_tokens"] == n * max_tokens
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "length"
        check_echo(choice["logprobs"], generated, max_tokens)
    whole = ask(server, echo=True, logprobs=1, max_tokens=max_tokens)["choices"][0]
    logprobs = whole["logprobs"]
    assert whole["text"].startswith("".join(logprobs["tokens"][: len(PROMPT)]))
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
    plain = ask(server, logprobs=1)["choices"][0]  # is_greedy of lm-eval: the chosen one is the best of the entry
    assert all(max(top.values()) == value for top, value in zip(
        plain["logprobs"]["top_logprobs"], plain["logprobs"]["token_logprobs"], strict=True))  # fmt: skip


def test_the_prompts_of_a_list_have_their_own(server: Server, generated: dict[str, Any]) -> None:
    choices = ask(server, prompt=[PROMPT, PROMPT[:4], [5]], echo=True, logprobs=3, max_tokens=0, **BY_ID)["choices"]
    check_echo(choices[0]["logprobs"], generated, 0)
    assert choices[1]["logprobs"]["token_logprobs"][1:] == close(generated["token_logprobs"][:3])
    assert choices[2]["logprobs"]["token_logprobs"] == [None] and choices[2]["text"]


def test_a_prompt_that_fills_the_context_is_scored(server: Server) -> None:
    """There is no room for a token, and none is asked for."""
    prompt = (PROMPT * 103)[:1024]
    choice = ask(server, prompt=prompt, echo=True, logprobs=1, max_tokens=0, **BY_ID)["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == 1024 and choice["finish_reason"] == "length"
    for asked in ({"max_tokens": 1}, {"max_tokens": 0, "prompt": [*prompt, 5]}):
        refused = server.http.post(
            "/v1/completions", json=BODY | {"prompt": prompt, "echo": True, "logprobs": 1} | asked
        )
        check_shape(refused, 400)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_streamed_echo(server: Server, generated: dict[str, Any], max_tokens: int) -> None:
    change = {"echo": True, "logprobs": 3, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, **BY_ID}
    with server.http.stream("POST", "/v1/completions", json=BODY | change | {"prompt_logprobs": 0}) as events:
        chunks = [json.loads(line[6:]) for line in lines_of(events) if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    joined = {key: sum((choice["logprobs"][key] for choice in choices), []) for key in choices[0]["logprobs"]}
    check_echo(joined, generated, max_tokens)
    assert [len(entry or ()) for entry in choices[0]["prompt_logprobs"]] == [0] + [1] * 9
    assert choices[-1]["finish_reason"] == "length"
    assert not any("prompt_logprobs" in choice for choice in choices[1:])


def test_prompt_logprobs(server: Server, generated: dict[str, Any]) -> None:
    found = ask(server, prompt_logprobs=3)["choices"][0]["prompt_logprobs"]
    assert found[0] is None and len(found) == len(PROMPT)
    for token_id, entry, value, top in zip(
        PROMPT[1:], found[1:], generated["token_logprobs"], generated["top_logprobs"], strict=True
    ):
        own = entry[str(token_id)]
        assert own["logprob"] == pytest.approx(value, abs=2e-4) and own["rank"] >= 1
        assert {f"token_id:{i}" for i in entry} == set(top) | {f"token_id:{token_id}"}
        ranked = sorted(entry.values(), key=lambda one: one["rank"])
        assert [one["rank"] for one in ranked][:3] == [1, 2, 3]
        assert [one["logprob"] for one in ranked] == sorted((one["logprob"] for one in ranked), reverse=True)
    only = ask(server, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert [list(entry) for entry in only[1:]] == [[str(token_id)] for token_id in PROMPT[1:]]
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 3}}
    for stream in (False, True):
        answer = server.http.post("/inference/v1/generate", json=body | {"stream": stream}).text
        same = json.loads(answer.removeprefix("data: ").split("\n\n")[0])["prompt_logprobs"]
        assert [entry and set(entry) for entry in same] == [entry and set(entry) for entry in found]


def test_prompt_logprobs_of_a_chat(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 1, "return_token_ids": True, "n": 2}
    answer = ask(server, "/v1/chat/completions", **chat)
    again = ask(server, prompt=answer["prompt_token_ids"], prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    for entry, expected in zip(answer["prompt_logprobs"][1:], again[1:], strict=True):
        assert entry.keys() == expected.keys()
        assert [one["logprob"] for one in entry.values()] == close([one["logprob"] for one in expected.values()])
    refused = server.http.post("/v1/chat/completions", json=BODY | chat | {"stream": True})
    check_shape(refused, 400, "prompt_logprobs")


def test_the_native_route_has_those_of_its_input(server: Server, generated: dict[str, Any]) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 1}, "return_logprob": True}
    plain = server.http.post("/generate", json=body).json()["meta_info"]
    assert "input_token_logprobs" not in plain
    asked = {"logprob_start_len": 0, "top_logprobs_num": 2}
    meta = server.http.post("/generate", json=body | asked).json()["meta_info"]
    values, ids, texts = zip(*meta["input_token_logprobs"], strict=True)
    assert list(ids) == PROMPT and values[0] is None and set(texts) == {None}
    assert list(values[1:]) == close(generated["token_logprobs"])
    assert meta["input_top_logprobs"][0] is None and all(len(top) == 2 for top in meta["input_top_logprobs"][1:])
    meta = server.http.post("/generate", json=body | {"logprob_start_len": 7}).json()["meta_info"]
    assert [value for value, _, _ in meta["input_token_logprobs"]] == close(generated["token_logprobs"][6:])


def test_named_tokens_take_the_place_of_the_likely_ones(server: Server) -> None:
    wanted = [44, 5, 300]
    names = [f"token_id:{token_id}" for token_id in wanted]
    choice = ask(server, logprob_token_ids=wanted, max_tokens=3, ignore_eos=True, **BY_ID)["choices"][0]
    most = ask(server, logprobs=20, max_tokens=3, ignore_eos=True, **BY_ID)["choices"][0]["logprobs"]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == close(most["token_logprobs"])
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert list(top)[:3] == names and set(top) == {*names, token}
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprob_token_ids": wanted, **BY_ID}
    entries = ask(server, "/v1/chat/completions", **chat)["choices"][0]["logprobs"]["content"]
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in entries] == [names]


def test_no_token_at_all_is_only_for_an_echo(server: Server) -> None:
    for change in (
        {"max_tokens": 0},
        {"max_tokens": 0, "echo": False, "logprobs": 1},
        {"max_tokens": -1, "echo": True},
    ):
        check_shape(server.http.post("/v1/completions", json=BODY | change), 400, "max_tokens")
