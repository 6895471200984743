"""Models, health, version, tokens, metrics, and the end of the process."""

import json
import re
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepinfer import __version__
from deepinfer.recipe import Tokenizer, encode_prompt, render_chat
from tests.server.process import MODEL, Server, lines_of, start_server


def test_models(server: Server) -> None:
    (model,) = server.client.models.list().data
    assert model.id == MODEL and model.model_extra is not None and model.model_extra["max_model_len"] == 1024
    assert server.client.models.retrieve(MODEL).id == MODEL


def test_health_and_version(server: Server) -> None:
    for path in ("/health", "/ping"):
        assert server.http.get(path).json() == {"status": "ok"}
    assert server.http.get("/version").json() == {"version": __version__}


def test_tokenize_and_back(server: Server, checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(checkpoint / "tokenizer.json")
    text = "Hello, wörld <think>"
    answer = server.http.post("/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == [0, *tokenizer.encode_text(text)]
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) and answer["max_model_len"] == 1024
    bare = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert bare == answer["tokens"][1:]
    assert server.http.post("/detokenize", json={"tokens": bare}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    chat = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert chat == encode_prompt(render_chat(messages), tokenizer)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_bad_token_requests(server: Server, path: str, body: dict, param: str) -> None:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_metrics_count_what_was_done(server: Server) -> None:
    names = {
        "prompt": "deepinfer:prompt_tokens_total",
        "generated": "deepinfer:generation_tokens_total",
        "first": "deepinfer:time_to_first_token_seconds_count",
        "latency": "deepinfer:e2e_request_latency_seconds_count",
        "queue": "deepinfer:request_queue_time_seconds_count",
    }
    before = {key: server.metric(name) for key, name in names.items()}
    finished = server.metric("deepinfer:request_success_total", finished_reason="length")
    handled = server.metric("http_requests_total", handler="/v1/completions", status="200")
    server.client.completions.create(
        model=MODEL, prompt=[0, 50, 51], max_tokens=5, n=2, extra_body={"ignore_eos": True}
    )
    after = {key: server.metric(name) - before[key] for key, name in names.items()}
    assert after == {"prompt": 3, "generated": 10, "first": 2, "latency": 2, "queue": 2}
    assert server.metric("deepinfer:request_success_total", finished_reason="length") == finished + 2
    assert server.metric("http_requests_total", handler="/v1/completions", status="200") == handled + 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert server.metric(f"deepinfer:{name}") == 0


def test_paths_that_clients_make_up_are_not_metric_labels(server: Server) -> None:
    server.http.get("/made/up/path")
    assert "made" not in httpx.get(f"{server.url}/metrics").text


def test_the_description_of_the_api_lists_every_route(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/chat/completions", "/v1/chat/completions/render", "/v1/completions", "/v1/completions/render",
        "/v1/responses", "/v1/responses/render", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel",
        "/v1/responses/{response_id}/input_items", "/v1/messages", "/v1/messages/render", "/v1/messages/count_tokens",
        "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize", "/health", "/ping", "/version", "/metrics",
        "/ready", "/health_generate", "/load", "/get_load", "/server_info", "/get_server_info", "/model_info",
        "/inference/v1/generate",
        "/get_model_info", "/generate", "/parse_function_call", "/separate_reasoning", "/abort_requests",
        "/abort_request", "/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/flush_cache", "/start_profile",
        "/stop_profile", "/start_expert_distribution_record", "/stop_expert_distribution_record",
        "/dump_expert_distribution_record",
    }  # fmt: skip
    assert not re.search(r'"\$ref": "#/\$defs', str(document))
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "top_k", "stop_token_ids", "return_token_ids"} <= set(schema["properties"])


def test_the_page_of_the_routes_loads_nothing(server: Server) -> None:
    """The whole schema is on it, and neither a script nor an address elsewhere."""
    page = server.http.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"<script|src=|https?://|//[a-z]+\.", page.text)
    paths = server.http.get("/openapi.json").json()["paths"]
    assert all(f"<code>{path}</code>" in page.text for path in paths)
    assert "<td><code>top_k</code></td><td>integer</td>" in page.text
    assert httpx.get(f"{server.url}/docs").status_code == httpx.get(f"{server.url}/openapi.json").status_code == 401
    assert any("GET /openapi.json 200" in line for line in server.log), server.log[-3:]


@pytest.mark.parametrize(("seconds", "status"), [(60, 200), (0, 503)])
def test_a_stopped_server_drains_or_refuses(checkpoint: Path, seconds: int, status: int) -> None:
    """Also: without keys nothing is checked, and the model is called like its folder."""
    server = start_server(checkpoint, "--shutdown-timeout", str(seconds))
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == checkpoint.name
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"model": checkpoint.name, "prompt": "hi", "max_tokens": 30 if seconds else 900, "ignore_eos": True}
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_for("deepinfer:num_requests_running", 1)
    server.process.send_signal(signal.SIGTERM)
    thread.join(timeout=60)
    assert [answer.status_code for answer in answers] == [status]
    if seconds:
        assert answers[0].json()["usage"]["completion_tokens"] == 30
    else:
        assert "shutting down" in answers[0].json()["error"]["message"]
    assert server.process.wait(timeout=30) in (0, -signal.SIGTERM)


def test_a_stream_that_the_server_may_not_finish_ends_with_an_error(checkpoint: Path) -> None:
    """After the second signal: an event says why, and the log has no traceback."""
    server = start_server(checkpoint, "--served-model-name", MODEL, "--shutdown-timeout", "60")
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 900, "ignore_eos": True, "stream": True}
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = lines_of(answer)
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            while httpx.get(f"{server.url}/ready").status_code != 503:
                pass
            server.process.send_signal(signal.SIGTERM)
            *_, error, done = [line.removeprefix("data: ") for line in lines if line]
        assert "shutting down" in json.loads(error)["error"]["message"] and done == "[DONE]"
        assert server.process.wait(timeout=30) in (0, -signal.SIGTERM)
        assert not any("Traceback" in line for line in server.log)
    finally:
        server.process.kill()


def test_a_config_file_gives_the_options_and_the_command_line_wins(checkpoint: Path, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("max-model-len: 512\nmax_num_seqs: 4\napi-key: [one, two]\nserved-model-name: from-file\n")
    server = start_server(checkpoint, "--config", str(config), "--served-model-name", "from-the-command-line")
    try:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        for key in ("one", "two"):
            answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
            (model,) = answer.json()["data"]
            assert (model["id"], model["max_model_len"]) == ("from-the-command-line", 512)
    finally:
        server.process.terminate()
        server.process.wait(timeout=60)


def test_options_as_other_servers_spell_them(checkpoint: Path) -> None:
    options = (
        "--context-length", "512", "--max-running-requests", "3", "--chunked-prefill-size", "64",
        "--allowed-origins", '["https://a.example"]', "--default-chat-template-kwargs", '{"enable_thinking": true}',
        "--enable-auto-tool-choice", "--tool-call-parser", "deepseekv4", "--reasoning-parser", "deepseek_v4",
        "--enable-metrics", "--served-model-name", "m",
    )  # fmt: skip
    server = start_server(checkpoint, *options)
    try:
        info = httpx.get(f"{server.url}/server_info").json()
        assert (info["max_model_len"], info["default_thinking"]) == (512, True)
        assert (info["engine_config"]["max_num_seqs"], info["engine_config"]["prefill_chunk_size"]) == (3, 64)
        answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": "https://a.example"})
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)


def test_the_model_recommends_sampling_parameters(checkpoint: Path, tmp_path: Path) -> None:
    """Where a request says nothing, over every route; --generation-config vllm leaves them out."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    (model / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.0, "top_p": 0.9}')
    user = [{"role": "user", "content": "hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi", "max_tokens": 16},
        "/v1/chat/completions": {"messages": user, "max_tokens": 16},
        "/v1/messages": {"messages": user, "max_tokens": 16},
        "/v1/responses": {"input": "hi", "max_output_tokens": 16},
        "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 16}},
    }

    def answers(url: str, path: str, temperature: float | None) -> set[str]:
        body = bodies[path] | {"model": "m"}
        if temperature is not None and path == "/generate":
            body["sampling_params"] = body["sampling_params"] | {"temperature": temperature}
        elif temperature is not None:
            body["temperature"] = temperature
        ids = r'"\w*id":"[^"]*"|"(?:created|completed)\w*":\d+|"e2e_latency":[\d.]+|"temperature":[\d.]+'
        return {re.sub(ids, "", httpx.post(url + path, json=body, timeout=60).text) for _ in range(3)}

    for source, greedy in (("auto", True), ("vllm", False), (str(model), True)):
        served = checkpoint if source == str(model) else model
        server = start_server(served, "--served-model-name", "m", "--generation-config", source)
        try:
            defaults = httpx.get(f"{server.url}/server_info").json()["sampling_defaults"]
            assert defaults == ({"temperature": 0.0, "top_p": 0.9} if greedy else {})
            for path in bodies:
                assert (len(answers(server.url, path, None)) == 1) == greedy, (source, path)
            echoed = httpx.post(f"{server.url}/v1/responses", json=bodies["/v1/responses"] | {"model": "m"}, timeout=60)
            assert (echoed.json()["temperature"], echoed.json()["top_p"]) == ((0.0, 0.9) if greedy else (1.0, 1.0))
            for path in bodies:
                assert len(answers(server.url, path, 0.0)) == 1 and len(answers(server.url, path, 1.5)) == 3
        finally:
            server.process.terminate()
            server.process.wait(timeout=30)
