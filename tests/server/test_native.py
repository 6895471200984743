"""SGLang's native routes: /generate, the parsers by themselves, and what its clients ask first."""

import json
from typing import Any

import pytest

from tests.server.process import MODEL, Server, lines_of
from tests.server.test_errors import check_shape
from tests.server.test_known_faults import THREE_CALLS

PARAMS: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def completion(server: Server, prompt: Any, **extra: Any) -> Any:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True} | extra
    return server.http.post("/v1/completions", json=body | {"return_token_ids": True}).json()["choices"]


def test_generate_equals_completions(server: Server) -> None:
    answer = server.http.post("/generate", json={"text": "hello there", "sampling_params": PARAMS, "rid": "r1"}).json()
    (choice,) = completion(server, "hello there")
    assert (answer["text"], answer["output_ids"]) == (choice["text"], choice["token_ids"])
    meta = answer["meta_info"]
    assert meta["id"] == "r1" and meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(choice["prompt_token_ids"]), 6)
    assert meta["e2e_latency"] > 0
    by_ids = server.http.post("/generate", json={"input_ids": choice["prompt_token_ids"], "sampling_params": PARAMS})
    assert by_ids.json()["output_ids"] == choice["token_ids"]


@pytest.mark.parametrize("n", [1, 2])
def test_lists_and_n_answer_as_lists(server: Server, n: int) -> None:
    body = {"text": ["one", "two"], "sampling_params": PARAMS | {"n": n}, "rid": "r"}
    answers = server.http.post("/generate", json=body).json()
    choices = completion(server, ["one", "two"], n=n)
    assert [entry["text"] for entry in answers] == [choice["text"] for choice in choices]
    assert [entry["meta_info"]["id"] for entry in answers] == [f"r-{index}" for index in range(2 * n)]


def test_stop_string_and_log_probabilities(server: Server) -> None:
    (free,) = completion(server, "hello", logprobs=2)
    stop = free["text"][2:4]
    params = PARAMS | {"stop": stop}
    body = {"text": "hello", "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    answer = server.http.post("/generate", json=body | {"return_text_in_logprobs": True}).json()
    assert answer["text"] == free["text"][: free["text"].index(stop)]
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": stop}
    logprobs = free["logprobs"]
    count = len(answer["output_ids"])
    expected = zip(logprobs["token_logprobs"], free["token_ids"], logprobs["tokens"], strict=True)
    assert meta["output_token_logprobs"] == [list(item) for item in expected][:count]
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])
    kept = server.http.post(
        "/generate", json=body | {"sampling_params": PARAMS | {"stop_token_ids": free["token_ids"][1:2]}}
    )
    assert kept.json()["meta_info"]["finish_reason"]["matched"] == free["token_ids"][1]


def test_each_event_holds_all_so_far(server: Server) -> None:
    whole = server.http.post("/generate", json={"text": ["one", "two"], "sampling_params": PARAMS}).json()
    last: dict[int, Any] = {}
    with server.http.stream(
        "POST", "/generate", json={"text": ["one", "two"], "sampling_params": PARAMS, "stream": True}
    ) as answer:
        lines = [line[6:] for line in lines_of(answer) if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    for event in map(json.loads, lines[:-1]):
        before = last.get(event["index"])
        assert before is None or event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        last[event["index"]] = event
    assert [last[index]["text"] for index in (0, 1)] == [entry["text"] for entry in whole]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [9999999]}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 99999}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"text": "a", "sampling_params": {"max_tokens": 5}}, "sampling_params"),
        ({"text": "a", "sampling_params": [PARAMS]}, "sampling_params"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "image_data": "x"}, "image_data"),
    ],
)
def test_bad_requests_are_refused_in_the_routes_own_terms(server: Server, body: dict[str, Any], param: str) -> None:
    error = check_shape(server.http.post("/generate", json=body), 400)
    assert error["param"] == param and param.rsplit(".")[-1] in error["message"]


def test_parse_function_call(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "now", "here")]
    body = {"text": f"Wait.\n\n{THREE_CALLS}<｜end▁of▁sentence｜>", "tools": tools, "tool_call_parser": "deepseekv4"}
    answer = server.http.post("/parse_function_call", json=body).json()
    assert answer["normal_text"] == "Wait."
    found = [(call["tool_index"], call["name"], json.loads(call["parameters"])) for call in answer["calls"]]
    assert found == [(1, "now", {}), (2, "here", {}), (0, "weather", {"city": -7})]
    undeclared = server.http.post("/parse_function_call", json={"text": THREE_CALLS, "tools": [{"function": 5}]}).json()
    assert [call["tool_index"] for call in undeclared["calls"]] == [-1, -1, -1]
    check_shape(
        server.http.post("/parse_function_call", json=body | {"tool_call_parser": "x"}), 400, "tool_call_parser"
    )


@pytest.mark.parametrize("start", ["", "<think>"])
def test_separate_reasoning(server: Server, start: str) -> None:
    def ask(text: str) -> tuple[str, str]:
        answer = server.http.post("/separate_reasoning", json={"text": start + text}).json()
        return answer["reasoning_text"], answer["text"]

    assert ask("I see.</think>Good morning!") == ("I see.", "Good morning!")
    assert ask("I see.</think>") == ("I see.", "")
    assert ask("I am not done") == ("I am not done", "")
    check_shape(server.http.post("/separate_reasoning", json={"text": "a", "reasoning_parser": "x"}), 400)


def test_what_clients_ask_first(server: Server) -> None:
    model = server.http.get("/get_model_info").json()
    assert (model["model_path"], model["is_generation"], model["max_model_len"]) == (MODEL, True, 1024)
    assert server.http.get("/model_info").json() == model
    info = server.http.get("/get_server_info").json()
    assert (info["served_model_name"], info["context_length"], info["max_running_requests"]) == (MODEL, 1024, 16)
    assert info["status"] == "ready" and info["internal_states"][0]["num_running_reqs"] == 0
    (load,) = server.http.get("/get_load").json()
    assert load == {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}


def test_token_ids_in_token_ids_out(server: Server) -> None:
    """vLLM's route: as Completions, without text."""
    (choice,) = completion(server, [0, 50, 51, 52], logprobs=1)
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 1}
    body = {"token_ids": [0, 50, 51, 52], "sampling_params": params, "request_id": "mine"}
    answer = server.http.post("/inference/v1/generate", json=body).json()
    (entry,) = answer["choices"]
    assert answer["request_id"] == "mine" and entry["token_ids"] == choice["token_ids"]
    assert entry["finish_reason"] == "length"
    content = entry["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert [one["logprob"] for one in content] == choice["logprobs"]["token_logprobs"]
    streamed: list[int] = []
    with server.http.stream("POST", "/inference/v1/generate", json=body | {"stream": True}) as events:
        lines = [line[6:] for line in lines_of(events) if line.startswith("data: ")]
    for event in map(json.loads, lines[:-1]):
        streamed += event["choices"][0]["token_ids"]
    assert lines[-1] == "[DONE]" and streamed == choice["token_ids"]
    for change, param in (
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "hi"}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"prompt_logprobs": 21}}, "sampling_params.prompt_logprobs"),
        ({"sampling_params": {"nothing": 1}}, "sampling_params"),
        ({"features": {}}, "features"),
    ):
        error = check_shape(server.http.post("/inference/v1/generate", json=body | change), 400)
        assert error["param"] == param, error
    check_shape(server.http.post("/inference/v1/generate", json=body | {"model": "other"}), 404)
