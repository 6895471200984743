"""Request fields of vLLM and SGLang: each is honoured, or refused by its name; none is silently dropped."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepinfer.checkpoint_tokenizer import load_tokenizer
from tests.server.process import MODEL, Server, lines_of
from tests.server.test_errors import check_shape

USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hello there", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
REFUSED: dict[str, Any] = {
    "length_penalty": 2.0, "use_beam_search": True, "best_of": 2, "prompt_logprobs": 21,
    "logprob_token_ids": [4, 4], "repetition_detection": {"min_count": 3},
    "structured_outputs": {"regex": "a", "json": "{}"}, "regex": "(", "ebnf": "a", "json_schema": "{",
    "structural_tag": {},
    "extra_key": "s", "kv_transfer_params": {}, "routed_experts_prompt_start": 1,
    "return_hidden_states": True, "return_routed_experts": True, "lora_path": "x", "stop_regex": "a",
    "custom_logit_processor": "x", "logits_processors": ["a"], "no_stop_trim": True, "data_parallel_rank": 1,
}  # fmt: skip
REFUSED_IN_CHAT = REFUSED | {
    "truncate_prompt_tokens": 3, "documents": [{"text": "a"}], "chat_template": "x", "thinking_token_budget": -1,
    "add_special_tokens": True, "separate_reasoning": False,
    "stream_reasoning": False, "mm_processor_kwargs": {"a": 1}, "response_format": {"type": "json_object"},
    "add_generation_prompt": False, "chat_template_kwargs": {"other": 1},
}  # fmt: skip


FOREIGN: dict[str, Any] = {
    "truncate_prompt_tokens": 3, "return_prompt_text": True, "include_reasoning": False, "separate_reasoning": False,
    "return_token_ids": True, "return_tokens_as_token_ids": True, "response_format": {"type": "json_object"},
    "max_completion_tokens": 5, "skip_special_tokens": False, "chat_template": "x", "documents": [{"text": "a"}],
    "chat_template_kwargs": {"thinking": True}, "echo": True, "continue_final_message": True,
    "add_generation_prompt": False, "prompt_logprobs": 1, "logprob_token_ids": [4],
    "repetition_detection": {"max_pattern_size": 2, "min_count": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_IN_CHAT)
def test_a_chat_field_that_cannot_be_honoured_is_refused_by_name(server: Server, name: str) -> None:
    error = check_shape(server.http.post("/v1/chat/completions", json=CHAT | {name: REFUSED_IN_CHAT[name]}), 400, name)
    assert name in error["message"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_completion_field_that_cannot_be_honoured_is_refused_by_name(server: Server, name: str) -> None:
    check_shape(server.http.post("/v1/completions", json=TEXT | {name: REFUSED[name]}), 400, name)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("name", FOREIGN)
def test_fields_that_other_protocols_lack(server: Server, path: str, name: str) -> None:
    body = {"model": MODEL, "input": "hi", "messages": [USER]} | {name: FOREIGN[name]}
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400 and name in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, ()),
        ({"skip_special_tokens": True}, ()),
        ({"skip_special_tokens": False}, ("bos", "pad", "eos")),
        ({"skip_special_tokens": False, "ignore_eos": False}, ("bos", "pad")),
        (
            {"skip_special_tokens": False, "ignore_eos": False, "include_stop_str_in_output": True},
            ("bos", "pad", "eos"),
        ),
    ],
)
def test_special_tokens_in_the_text_of_an_answer(
    server: Server, checkpoint: Path, fields: dict[str, bool], shown: tuple[str, ...]
) -> None:
    tokenizer = load_tokenizer(checkpoint)
    words = tokenizer.encode_text("ab")
    golden = [*words, tokenizer.control_id("bos"), tokenizer.control_id("pad"), tokenizer.control_id("eos")]
    body = TEXT | {"golden_token_ids": golden, "max_tokens": len(golden)} | fields
    text = "ab" + "".join(tokenizer.decode([tokenizer.control_id(role)]) for role in shown)
    assert server.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
    chat = CHAT | {"golden_token_ids": golden, "max_tokens": len(golden)} | fields
    answer = server.http.post("/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["message"]["content"] == text
    begin = tokenizer.control_id("bos")
    params = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True, "logit_bias": {str(begin): 100.0}} | fields
    params.pop("include_stop_str_in_output", None)
    answer = server.http.post("/generate", json={"text": "a", "sampling_params": params}).json()
    assert answer["text"] == (2 * tokenizer.decode([begin]) if shown else "")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("name", ["request_id", "rid"])
def test_the_client_names_its_request(server: Server, path: str, name: str) -> None:
    body = (CHAT if "chat" in path else TEXT) | {name: "mine-7", "session_id": "s-1"}
    answer = server.http.post(path, json=body).json()
    assert answer["id"] == ("chatcmpl-mine-7" if "chat" in path else "cmpl-mine-7")
    check_shape(server.http.post(path, json=body | {name: "a b"}), 400, name)
    long = body | {"max_tokens": 900, "stream": True}
    with server.http.stream("POST", path, json=long) as stream:
        lines = lines_of(stream)
        next(lines)
        assert server.http.post("/abort_request", json={"rid": "mine-7"}).json()["aborted"] == ["mine-7"]
        assert any('"abort"' in line for line in lines)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_answer_that_repeats_itself_ends(server: Server, path: str) -> None:
    """Only one token is allowed: a pattern as soon as it stands there four times."""
    body = (CHAT if "chat" in path else TEXT) | {"allowed_token_ids": [20], "max_tokens": 20, "return_token_ids": True}
    asked = body | {"repetition_detection": {"max_pattern_size": 2, "min_count": 4}}
    choice = server.http.post(path, json=asked).json()["choices"][0]
    assert choice["token_ids"] == [20] * 4
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition_detected")
    refused = server.http.post(path, json=body | {"repetition_detection": {"max_pattern_size": 65, "min_count": 2}})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "repetition_detection"
    assert error["message"].startswith("repetition_detection.max_pattern_size must be an integer in [1, 64]")


@pytest.mark.parametrize("keep", [1, 3, 1000])
def test_a_prompt_is_truncated_on_the_side_asked_for(server: Server, keep: int) -> None:
    ids = list(range(20, 30))
    body = TEXT | {"prompt": ids, "truncate_prompt_tokens": keep, "return_token_ids": True, "return_prompt_text": True}
    left = server.http.post("/v1/completions", json=body).json()
    right = server.http.post("/v1/completions", json=body | {"truncation_side": "right"}).json()
    assert left["choices"][0]["prompt_token_ids"] == ids[-keep:]
    assert right["choices"][0]["prompt_token_ids"] == ids[:keep]
    assert left["usage"]["prompt_tokens"] == min(keep, 10)
    plain = server.http.post("/v1/completions", json=TEXT | {"prompt": ids[-keep:]}).json()
    assert left["choices"][0]["text"] == plain["choices"][0]["text"]
    shown = server.http.post("/detokenize", json={"tokens": ids[-keep:]}).json()["prompt"]
    assert left["choices"][0]["prompt_text"] == shown


def test_truncation_to_the_context_leaves_room_for_the_answer(server: Server) -> None:
    body = TEXT | {"prompt": [20] * 1024, "truncate_prompt_tokens": -1, "max_tokens": 5}
    assert server.http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == 1024 - 5
    check_shape(server.http.post("/v1/completions", json=body | {"truncate_prompt_tokens": -2}), 400)
    check_shape(server.http.post("/v1/completions", json=body | {"truncate_prompt_tokens": 0}), 400, "prompt")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_left_out_if_asked(server: Server, stream: bool) -> None:
    """A random model never stops thinking: all of its text is reasoning."""
    body = CHAT | {"thinking": {"type": "enabled"}, "logprobs": True, "return_token_ids": True, "max_tokens": 12}

    def read(extra: dict[str, Any]) -> tuple[str, str, list[int], int]:
        asked = body | extra | {"stream": stream}
        if not stream:
            choice = server.http.post("/v1/chat/completions", json=asked).json()["choices"][0]
            said, logprobs = choice["message"], choice["logprobs"] or {}
            texts = said.get("reasoning_content", ""), said.get("reasoning", "")
            return *texts, choice["token_ids"], len(logprobs.get("reasoning_content") or ())
        old = new = ""
        ids: list[int] = []
        count = 0
        with server.http.stream("POST", "/v1/chat/completions", json=asked) as answer:
            for line in lines_of(answer):
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    old += choice["delta"].get("reasoning_content") or ""
                    new += choice["delta"].get("reasoning") or ""
                    ids += choice["token_ids"]
                    count += len((choice["logprobs"] or {}).get("reasoning_content") or ())
        return old, new, ids, count

    old, new, ids, count = read({})
    assert old == new and old and len(ids) == 12 and count
    assert read({"include_reasoning": False}) == ("", "", ids, 0)


def test_an_answer_continues_the_last_message(server: Server) -> None:
    messages = [USER, {"role": "assistant", "content": "Once upon"}]
    body = CHAT | {"messages": messages, "return_prompt_text": True}
    marked = body | {"messages": [USER, messages[1] | {"prefix": True}]}
    asked = body | {"continue_final_message": True, "add_generation_prompt": False}
    one, other = (server.http.post("/v1/chat/completions", json=each).json() for each in (asked, marked))
    assert one["prompt_text"].endswith("Once upon") and one["prompt_text"] == other["prompt_text"]
    assert one["choices"][0]["message"] == other["choices"][0]["message"]
    rendered = server.http.post("/v1/chat/completions/render", json=asked).json()
    assert rendered["prompt"] == one["prompt_text"]
    for wrong in ({"add_generation_prompt": True}, {"messages": [USER]}):
        check_shape(server.http.post("/v1/chat/completions", json=asked | wrong), 400, "continue_final_message")


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_repeats_the_message_that_it_continues(server: Server, stream: bool) -> None:
    parts = [{"type": "text", "text": "Once "}, {"type": "text", "text": "u"}]
    messages = [USER, {"role": "assistant", "content": parts}]

    def read(extra: dict[str, Any]) -> str:
        asked = CHAT | {"messages": messages, "continue_final_message": True, "stream": stream} | extra
        if not stream:
            return server.http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
        with server.http.stream("POST", "/v1/chat/completions", json=asked) as answer:
            chunks = [json.loads(line[6:]) for line in lines_of(answer) if line.startswith("data: {")]
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)

    plain = read({})
    assert plain and read({"echo": True}) == "Once u" + plain
    # Nothing is repeated of another's message, as in vLLM.
    assert read({"echo": True, "messages": [USER], "continue_final_message": False}) == read(
        {"messages": [USER], "continue_final_message": False}
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_cache_salt_is_checked_and_changes_nothing(server: Server, path: str) -> None:
    body = {"model": MODEL, "temperature": 0, "max_output_tokens" if path == "/v1/responses" else "max_tokens": 5}
    body |= {"prompt": "hi"} if path == "/v1/completions" else {"messages": [USER], "input": "hi"}
    answers = [server.http.post(path, json=body | salt) for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})]
    assert [answer.status_code for answer in answers] == [200] * 3
    texts = [re.findall(r'"(?:text|content)":"([^"]+)"', answer.text) for answer in answers]
    assert texts[0] == texts[1] == texts[2]
    for wrong in ("", "x" * 1025, 5, ["a"]):
        refused = server.http.post(path, json=body | {"cache_salt": wrong})
        assert refused.status_code == 400 and "cache_salt" in refused.text


def test_log_probabilities_name_tokens_by_id(server: Server) -> None:
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = server.http.post("/v1/completions", json=TEXT | extra | {"logprobs": 2}).json()["choices"][0]
    names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(
        len(top) in (2, 3) and name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True)
    )
    chat = CHAT | extra | {"logprobs": True, "top_logprobs": 2}
    choice = server.http.post("/v1/chat/completions", json=chat).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in choice["token_ids"]][: len(entries)]
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries), "greedy"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_only_allowed_tokens_are_chosen(server: Server, path: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "temperature": 1, "ignore_eos": True}
    body |= {"max_output_tokens": 30, "input": "hi"} if path == "/v1/responses" else {"max_tokens": 30}
    body |= {"prompt": "hi"} if path == "/v1/completions" else {"messages": [USER]}
    letters = server.http.post("/tokenize", json={"prompt": "abc", "add_special_tokens": False}).json()["tokens"]
    answer = server.http.post(path, json=body | {"allowed_token_ids": letters})
    assert answer.status_code == 200, answer.text
    texts = re.findall(r'"(?:text|content)":"([^"]+)"', answer.text)
    assert texts and set("".join(texts)) <= set("abc")
    for wrong in ([-1], [9999999], ["a"]):
        refused = server.http.post(path, json=body | {"allowed_token_ids": wrong})
        assert refused.status_code == 400 and "allowed_token_ids" in refused.text


def test_bad_words_do_not_appear(server: Server) -> None:
    """Greedy: the free answer up to the bad word, then another token; also for a word of several tokens."""
    free = server.http.post("/v1/completions", json=TEXT | {"return_token_ids": True, "max_tokens": 12}).json()
    ids = free["choices"][0]["token_ids"]
    for start, length in ((4, 1), (4, 3)):
        word = server.http.post("/detokenize", json={"tokens": ids[start : start + length]}).json()["prompt"]
        spelled = server.http.post("/tokenize", json={"prompt": word.lstrip(), "add_special_tokens": False}).json()
        if word != word.lstrip() or spelled["tokens"] != ids[start : start + length]:
            continue  # spelled in other tokens when it stands alone
        asked = TEXT | {"bad_words": [word], "return_token_ids": True, "max_tokens": 12}
        found = server.http.post("/v1/completions", json=asked).json()["choices"][0]["token_ids"]
        cut = start + length - 1
        assert found[:cut] == ids[:cut] and found[cut] != ids[cut]
        runs = [tuple(found[i : i + length]) for i in range(len(found))]
        assert tuple(spelled["tokens"]) not in runs
    for wrong in ([""], [" "], "a", [5], ["x"] * 300):
        check_shape(server.http.post("/v1/completions", json=TEXT | {"bad_words": wrong}), 400, "bad_words")


def test_tokenize_answers_under_both_paths(server: Server) -> None:
    for path, body in (("tokenize", {"prompt": "hello"}), ("detokenize", {"tokens": [50, 60]})):
        assert server.http.post(f"/v1/{path}", json=body).json() == server.http.post(f"/{path}", json=body).json()
