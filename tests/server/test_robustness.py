"""Any body gets an answer or a 4xx in the one error shape, and the README's examples work."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.process import KEY, MODEL, Server, start_server

README = (Path(__file__).parents[2] / "README.md").read_text()
FIELDS = (
    "model", "messages", "prompt", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "return_token_ids", "logprobs", "top_logprobs",
    "echo", "tools", "tool_choice", "thinking", "reasoning_effort", "response_format", "chat_template_kwargs", "user",
    "add_special_tokens", "tokens", "input", "instructions", "previous_response_id", "store", "include", "text",
    "metadata", "reasoning", "max_output_tokens", "system", "stop_sequences", "output_config", "background",
    "include_stop_str_in_output", "request_ids", "abort_all",
)  # fmt: skip

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 600),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["auto", "required", "none", "high", "user", "<｜User｜>", "json_object", MODEL]),
    st.sampled_from(["assistant", "system", "tool_use", "tool_result", "document", "function_call", "reasoning"]),
)
keys = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "function",
        "name",
        "parameters",
        "strict",
        "include_usage",
        "tool_calls",
        "1",
        "input_schema",
        "source",
        "tool_use_id",
        "id",
        "input",
        "effort",
        "format",
        "thinking",
        "call_id",
        "output",
    ]
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
)
PATHS = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2, "max_tokens": None},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/abort_requests": {"request_ids": ["none"]},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions/render": {"prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [50]},
}


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(sorted(PATHS)), changes=st.dictionaries(st.sampled_from(FIELDS), values, max_size=3))
def test_no_body_is_a_server_error(server: Server, path: str, changes: dict[str, Any]) -> None:
    body = {"model": MODEL, "max_tokens": 2} | PATHS[path] | changes
    with server.http as client, client.stream("POST", path, json=body) as answer:
        text = answer.read().decode()
    assert answer.status_code < 500, text
    if answer.status_code >= 400 and "messages" in path:
        assert set(json.loads(text)["error"]) == {"type", "message"}
    elif answer.status_code >= 400:
        assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}
    assert '"server_error"' not in text and '"api_error"' not in text


@pytest.mark.parametrize("depth", [100, 900, 5000, 100_000])
@pytest.mark.parametrize("place", ["tools", "content", "unknown"])
def test_deep_nesting(server: Server, depth: int, place: str) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    content = deep if place == "content" else '"hi"'
    body = f'{{"model": "{MODEL}", "max_tokens": 1, "messages": [{{"role": "user", "content": {content}}}]'
    if place == "tools":
        body += f', "tools": [{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}]'
    elif place == "unknown":
        body += f', "unknown": {deep}'
    answer = server.http.post("/v1/chat/completions", content=body + "}")
    assert answer.status_code in (200, 400), answer.text
    assert answer.status_code == 200 or answer.json()["error"]["type"] == "invalid_request_error"


def test_many_streams_at_once_are_all_answered(server: Server) -> None:
    """More than the engine holds at once (16): the others wait and none is lost."""
    import asyncio

    async def one(client, number: int) -> int:  # type: ignore[no-untyped-def]
        stream = await client.completions.create(
            model=MODEL, prompt=[0, 50 + number], max_tokens=4, stream=True, extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )  # fmt: skip
        return [chunk.usage.completion_tokens async for chunk in stream if chunk.usage][-1]

    async def all_of_them() -> list[int]:
        async with server.async_client as client:
            return await asyncio.gather(*(one(client, number) for number in range(100)))

    assert asyncio.run(all_of_them()) == [4] * 100
    assert server.metric("deepinfer:kv_cache_usage_perc") == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_examples_of_the_readme(server: Server) -> None:
    block = next(block for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if "curl" in block)
    commands = [command.strip() for command in block.split("\n\n")]
    assert len(commands) == 4
    for command in commands:
        command = command.replace("http://localhost:8000", server.url).replace('"nano"', f'"{MODEL}"')
        command = command.replace("curl ", f"curl -sS --fail-with-body -H 'Authorization: Bearer {KEY}' ", 1)
        answer = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        if "completions" in command:
            assert '"choices"' in answer.stdout
            assert ("data: [DONE]" in answer.stdout) is ("stream" in command)
        else:
            assert '"output"' in answer.stdout or "event: message_stop" in answer.stdout


def test_the_client_example_of_the_readme(checkpoint: Path, server: Server) -> None:
    open_server = start_server(checkpoint, "--served-model-name", "nano")
    try:
        example = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "OpenAI" in block)
        answer = subprocess.run(
            [sys.executable, "-c", example.replace("http://localhost:8000", open_server.url)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert answer.returncode == 0 and answer.stdout.strip(), answer.stderr
    finally:
        open_server.process.terminate()
        open_server.process.wait(timeout=60)
