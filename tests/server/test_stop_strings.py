"""Nothing of a stop string is sent early, and nothing behind one counts, in text, tokens or usage."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deepinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprob
from deepinfer.params import SamplingParams
from deepinfer.recipe import ParsingOptions, StopStrings, StreamParser, Tokenizer
from deepinfer.server.text_engine import TextEngine, TextReader
from tests.server.process import MODEL, Server, lines_of


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(checkpoint / "tokenizer.json")


@pytest.mark.parametrize("stops", [["DEFGHIJ"], ["DEFGHIJ", "DEF"], ["DEF", "DEFGHIJ"], ["F"], ["EFGHIJKLMNOP", "GH"]])
@pytest.mark.parametrize("text", ["ABCDEFGHIJK", "ABCDEFGHX", "DEFDEFGHIJ", "xDEFGHI", "DEDEDEFG"])
@pytest.mark.parametrize("include", [False, True])
def test_vllm_3574_nothing_of_a_stop_string_is_sent_early(stops: list[str], text: str, include: bool) -> None:
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    end, _, stop = min(ends, default=(len(text), 0, ""))
    expected = text[:end] if include or not stop else text[: end - len(stop)]
    options = ParsingOptions(stop_sequences=tuple(stops), include_stop_string=include)
    for size in range(1, 7):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        matcher, parser = StopStrings(stops, include), StreamParser(options)
        plain = parsed = ""
        for piece in pieces:
            plain += matcher.push(piece)[0] if matcher.stopped is None else ""
            parsed += "".join(event.text for event in parser.push(piece))  # type: ignore[union-attr]
            assert expected.startswith(plain) and expected.startswith(parsed)
        assert plain + matcher.finish() == expected
        assert parsed + "".join(event.text for event in parser.finish()) == expected  # type: ignore[union-attr]
        assert (matcher.stopped or "") == (parser.stop_string or "") == stop


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("include", [False, True])
def test_vllm_3574_stream_equals_whole_with_and_without_the_stop_string(
    server: Server, path: str, include: bool
) -> None:
    body = {"model": MODEL, "temperature": 0, "max_tokens": 24}
    body |= {"prompt": "Once"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Once"}]}

    def text(extra: dict[str, Any]) -> str:
        choice = server.http.post(path, json=body | extra).json()["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    stop = text({})[8:13]
    asked = {"stop": ["never this", stop], "include_stop_str_in_output": include}
    full = text({})
    expected = full[: full.index(stop) + (len(stop) if include else 0)]
    assert text(asked) == expected
    streamed = ""
    with server.http.stream("POST", path, json=body | asked | {"stream": True}) as answer:
        for line in lines_of(answer):
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                streamed += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    assert streamed == expected


class Bursts:
    """An engine that gives a fixed sequence, several tokens a step, as speculation does."""

    max_model_len = 100

    def __init__(self, token_ids: list[int], size: int):
        self.token_ids, self.size, self.closed = token_ids, size, False

    async def generate(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        try:
            for start in range(0, len(self.token_ids), self.size):
                ids = self.token_ids[start : start + self.size]
                ended = start + self.size >= len(self.token_ids)
                logprobs = [TokenLogprob(token_id, -float(token_id), []) for token_id in ids]
                output = CompletionOutput(0, ids, logprobs, "length" if ended else None)
                yield RequestOutput(request_id, list(prompt), [output], ended, RequestMetrics(0.0))
        finally:
            self.closed = True


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("lead", range(5))
def test_vllm_47616_everything_is_cut_at_the_token_that_completes_the_stop(
    size: int, lead: int, tokenizer: Tokenizer
) -> None:
    token_ids = tokenizer.encode_text("x" * lead + "y ha ha ha and more and more")
    text = ""
    for count in range(1, len(token_ids) + 1):  # the token with which the stop string is complete
        text = tokenizer.decode(token_ids[:count])
        if " ha ha ha" in text:
            break
    engine = Bursts(token_ids, size)
    texts = TextEngine(engine, tokenizer, "m")  # type: ignore[arg-type]

    async def read() -> list[Any]:
        stream = texts.stream([0], SamplingParams(logprobs=2), TextReader(tokenizer, [" ha ha ha"]))
        return [delta async for delta in stream]

    deltas = asyncio.run(read())
    assert "".join(piece for delta in deltas for piece in delta.pieces) == text[: text.index(" ha ha ha")]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == token_ids[:count]
    assert [item.token_id for delta in deltas for item in delta.logprobs] == token_ids[:count]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", " ha ha ha") and engine.closed


@pytest.mark.parametrize("stream", [False, True])
def test_vllm_47616_usage_and_ids_are_cut_where_the_text_is(server: Server, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "logprobs": 2, "stream_options": {"include_usage": True}}
    free = server.http.post("/v1/completions", json=body).json()["choices"][0]
    texts = [
        server.http.post("/detokenize", json={"tokens": free["token_ids"][:count]}).json()["prompt"]
        for count in range(1, 25)
    ]
    stop = texts[-1][9:12]
    count = next(number for number, text in enumerate(texts, 1) if stop in text)
    asked = body | {"stop": [stop], "stream": stream}
    if not stream:
        answer = server.http.post("/v1/completions", json=asked).json()
        parts, usage = answer["choices"], answer["usage"]
    else:
        with server.http.stream("POST", "/v1/completions", json=asked) as answer:
            events = [json.loads(line[6:]) for line in lines_of(answer) if line.startswith("data: {")]
        parts, usage = [event["choices"][0] for event in events[:-1]], events[-1]["usage"]
    assert [token_id for part in parts for token_id in part["token_ids"]] == free["token_ids"][:count]
    logprobs = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
    assert logprobs == free["logprobs"]["token_logprobs"][:count]
    assert usage["completion_tokens"] == count
    assert "".join(part["text"] for part in parts) == texts[-1][: texts[-1].index(stop)]
    assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == ("stop", stop)
