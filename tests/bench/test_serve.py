"""The load generator against a server with known delays and faults, and against `deepinfer serve`."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer.bench.results import load as load_records
from deepinfer.bench.serve_client import Load, Sample, Target, carries_output, connect, run_load
from deepinfer.bench.serve_files import SONNET_QUESTION
from deepinfer.bench.serve_report import summarize, warnings
from deepinfer.bench.serve_workload import arrival_times
from deepinfer.cli import main
from tests.bench.sse_server import SseServer, running, some_requests
from tests.checkpoints import write_tiny_checkpoint
from tests.server.process import start_server

SLACK = 1.0  # seconds that a busy machine may add to a delay, once


def measure(
    server: SseServer,
    count: int = 4,
    output_len: int = 4,
    arrivals: list[float] | None = None,
    max_concurrency: int | None = None,
    chat: bool = False,
    timeout: float = 30.0,
    on_done: Callable[[Sample], None] = lambda sample: None,
) -> Load:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    target = Target(server.url + path, "made-up", chat, timeout, {"temperature": 0})

    async def run() -> Load:
        async with connect(count, {}) as clients:
            requests = some_requests(count, output_len)
            return await run_load(clients, target, requests, arrivals or [0.0] * count, max_concurrency, on_done)

    return asyncio.run(run())


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_latencies_are_those_of_the_server(chat: bool) -> None:
    """TTFT is bounded by the server's delay, and every chunk's time by when the server wrote it.

    A chat stream opens with a chunk without content, which must not count as the first token.
    """
    with running(SseServer(first_delay=0.2, gap=0.04)) as server:
        samples = measure(server, count=3, output_len=6, max_concurrency=1, chat=chat).samples
    assert len(server.seen) == 3
    excess = []
    for sample, seen in zip(samples, server.seen, strict=True):
        assert sample.error is None and sample.finish_reason == "length"
        assert (sample.prompt_tokens, sample.cached_tokens, sample.output_tokens) == (7, 3, 6)
        # Sent before it was received, and stamped after it was written: an exact lower bound on one clock.
        written = [time - seen.received for time in seen.chunks]
        late = [stamped - since for stamped, since in zip(sample.chunk_times, written, strict=True)]
        assert min(late) >= 0 and written[0] >= 0.19
        excess += late
        assert sample.ttft == sample.chunk_times[0] and sample.e2e == sample.chunk_times[-1]
        assert sample.itl == pytest.approx(np.diff(sample.chunk_times))
        assert sample.tpot == pytest.approx((sample.e2e - sample.ttft) / 5)
    assert np.median(excess) < 0.03 and max(excess) < SLACK


def test_tokens_come_from_usage_and_not_from_chunks() -> None:
    """Two tokens a chunk, as with speculation: ITL is the gap of chunks, TPOT half of it."""
    with running(SseServer(first_delay=0.02, gap=0.06, tokens_per_chunk=2)) as server:
        (sample,) = measure(server, count=1, output_len=10).samples
    assert sample.output_tokens == 10 and len(sample.chunk_times) == 5 and sample.tpot is not None
    assert sample.tpot == pytest.approx((sample.e2e - sample.chunk_times[0]) / 9)
    assert np.mean(sample.itl) == pytest.approx(sample.tpot * 9 / 4) and sample.e2e >= 4 * 0.06


def test_events_may_be_cut_anywhere() -> None:
    with running(SseServer(fault="fragments")) as server:
        (sample,) = measure(server, count=1, output_len=3).samples
    assert sample.error is None and len(sample.chunk_times) == 3 and sample.output_tokens == 3


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("busy", "HTTP 429", "too many requests"),
        ("html", "HTTP 502", "<h1>bad gateway</h1>"),
        ("error", "error in the stream", "the engine stopped"),
        ("cut", "connection lost", ""),
        ("unfinished", "stream ended early", "finish_reason"),
        ("garbage", "malformed stream", "JSONDecodeError"),
        ("hang", "timeout", "after 2 s"),
    ],
)
def test_faults_have_kinds(fault: str, kind: str, message: str) -> None:
    with running(SseServer(faults={1: fault})) as server:
        samples = measure(server, count=3, max_concurrency=1, timeout=2).samples
    assert [sample.error for sample in samples] == [None, kind, None]
    assert message in samples[1].message


def test_an_unreachable_server_is_a_failure_of_each_request() -> None:
    with running(SseServer()) as server:
        pass
    assert [sample.error for sample in measure(server, count=2).samples] == ["connection failed"] * 2


def test_an_answer_without_usage_succeeds_without_token_counts() -> None:
    with running(SseServer(fault="no usage")) as server:
        (sample,) = measure(server, count=1).samples
    assert sample.error is None and sample.output_tokens is None and sample.tpot is None and sample.ttft is not None


def test_closed_loop_keeps_its_number_in_flight() -> None:
    with running(SseServer(first_delay=0.03, gap=0.01, hold_until=5)) as server:
        load = measure(server, count=24, max_concurrency=5)
    summary = summarize(load, {}, (99,))
    assert server.connections == 5  # used again
    assert server.peak == 5 == summary["max_concurrent_requests"] and summary["completed"] == 24
    assert summary["mean_concurrent_requests"] > 3
    queued = [sample.queued for sample in load.samples]
    assert max(queued[:5]) < 0.03 <= min(queued[5:]) and min(queued[20:]) > max(queued[5:10])


def test_burst_sends_all_at_once() -> None:
    with running(SseServer(hold_until=200)) as server:
        load = measure(server, count=200, output_len=2)
    assert server.peak == 200 and all(sample.error is None for sample in load.samples)
    assert {seen.body["prompt"] for seen in server.seen} == {f"prompt {number}" for number in range(200)}


def test_open_loop_follows_its_plan_however_slow_the_answers() -> None:
    planned = arrival_times(20, 25.0, 1.0, np.random.default_rng(5))
    with running(SseServer(first_delay=0.4)) as server:
        load = measure(server, count=20, output_len=1, arrivals=planned)
    received = [seen.received - server.seen[0].received for seen in server.seen]
    assert np.median(np.abs(np.array(received) - planned)) < 0.05
    for sample, due in zip(load.samples, planned, strict=True):
        assert sample.lag >= 0 and sample.queued < SLACK
        assert sample.started == pytest.approx(due + sample.lag + sample.queued)


def test_a_client_that_is_late_shows() -> None:
    """Work that blocks the event loop is seen by the timer, and the report warns of it."""
    with running(SseServer()) as server:
        load = measure(server, count=8, max_concurrency=1, on_done=lambda sample: time.sleep(0.1))
    assert max(load.loop_lags) >= 0.05
    assert np.mean(np.array(load.loop_lags) > 0) > 0.5  # a block of 0.1 s counts as the five timers that it held up
    assert "overloaded" in warnings(summarize(load, {}, (99,)))[0]


def test_what_counts_as_output() -> None:
    assert carries_output({"text": "a"}) and carries_output({"text": "", "token_ids": [5]})
    for key, value in (("content", "a"), ("reasoning", "a"), ("reasoning_content", "a"), ("tool_calls", [{}])):
        assert carries_output({"delta": {key: value}})
    for choice in ({"text": ""}, {"delta": {"role": "assistant", "content": ""}}, {"delta": None}, {}):
        assert not carries_output(choice)


# The command


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `deepinfer bench serve` in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            main(["bench", "serve", *arguments])
        out, err = capsys.readouterr()
        assert isinstance(exit_info.value.code, int)
        return exit_info.value.code, out, err

    return run


SMALL = ("--random-input-len", "6", "--random-output-len", "3")
Command = Callable[..., tuple[int, str, str]]


def test_the_command_reports_and_saves(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "results" / "run.json"
    with running(SseServer(first_delay=0.02)) as server:
        code, out, err = command(
            "--base-url", server.url + "/v1/", "--num-prompts", "10", *SMALL, "--request-rate", "100",
            "--goodput", "ttft:5000", "tpot:5000", "--output-json", str(path), "--save-detailed", "--api-key", "abc",
            "--ignore-eos", "--extra-body", '{"top_k": 5}', "--metadata", "host=here", "--num-warmups", "2",
        )  # fmt: skip
    assert code == 0, err
    assert "Serving Benchmark Result" in out and "Mean TTFT (ms):" in out and f"wrote {path}" in out
    assert len(server.seen) == 12 and {seen.path for seen in server.seen} == {"/v1/completions"}
    body = server.seen[-1].body
    assert len(body.pop("prompt").split()) == 6
    assert body == {
        "model": "made-up", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3,
        "temperature": 0, "ignore_eos": True, "top_k": 5,
    }  # fmt: skip
    assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer abc"}
    saved = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert saved["completed"] == 10 and saved["total_output_tokens"] == 30 and saved["total_input_tokens"] == 70
    assert saved["model_id"] == "made-up" and saved["host"] == "here" and saved["request_rate"] == 100
    assert saved["request_goodput"] == saved["request_throughput"] == pytest.approx(10 / saved["duration"])
    assert len(saved["samples"]) == 10
    ttfts = [sample["ttft"] * 1e3 for sample in saved["samples"]]
    assert saved["p99_ttft_ms"] == pytest.approx(np.percentile(ttfts, 99)) and min(ttfts) >= 20
    assert saved["mean_itl_ms"] == pytest.approx(np.mean([sample["itl"] for sample in saved["samples"]]) * 1e3)
    assert "abc" not in path.read_text()


def test_chat_and_every_dataset(command: Command, tmp_path: Path) -> None:
    sharegpt, trace, out = tmp_path / "sharegpt.json", tmp_path / "trace.jsonl", tmp_path / "out.json"
    turns = [{"from": "human", "value": "what is it?"}, {"from": "gpt", "value": "nothing much, really"}]
    sharegpt.write_text(json.dumps([{"conversations": turns}]))
    lines = [{"timestamp": 300 * number, "prompt": f"trace {number}", "output_length": 2} for number in range(3)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    questions, poem = tmp_path / "questions.jsonl", tmp_path / "poem.txt"
    questions.write_text(json.dumps({"category": "math", "turns": ["1 + 1?", "why?"]}))
    poem.write_text("so is it not with me as with that muse\n")
    sonnet = ("--num-prompts", "1", "--sonnet-prefix-len", "14", "--sonnet-input-len", "24")
    with running(SseServer()) as server:
        common = ("--base-url", server.url, "--backend", "openai-chat", "--num-warmups", "0", "--output-json", str(out))
        for options, expected in (
            (("--dataset-name", "sharegpt", "--dataset-path", str(sharegpt)), ["what is it?"]),
            (("--dataset-name", "spec_bench", "--dataset-path", str(questions)), ["1 + 1?"]),
            (("--dataset-name", "sonnet", "--dataset-path", str(poem), *sonnet), [SONNET_QUESTION + poem.read_text()]),
            (("--dataset-name", "timed_trace", "--dataset-path", str(trace)), ["trace 0", "trace 1", "trace 2"]),
        ):
            server.seen.clear()
            code, _, err = command(*common, *options)
            assert code == 0, err
            assert [seen.body["messages"][0]["content"] for seen in server.seen] == expected
            assert {seen.path for seen in server.seen} == {"/v1/chat/completions"}
        received = [seen.received - server.seen[0].received for seen in server.seen]
        assert received == pytest.approx([0, 0.3, 0.6], abs=0.25)
        assert json.loads(out.read_text())["request_rate"] == "trace"
        server.seen.clear()
        code, _, err = command(
            *common, "--dataset-name", "prefix_repetition", "--num-prompts", "4", "--prefix-repetition-num-prefixes",
            "2", "--prefix-repetition-prefix-len", "8", "--prefix-repetition-suffix-len", "3",
        )  # fmt: skip
        assert code == 0, err
        prompts = [seen.body["messages"][0]["content"].split() for seen in server.seen]
        assert sorted(map(len, prompts)) == [11] * 4 and len({tuple(prompt[:8]) for prompt in prompts}) == 2


def test_names_and_files_of_other_tools(command: Command, tmp_path: Path) -> None:
    """SGLang's spellings, a line for each run, vLLM's lists of requests, and fewer latencies in the table."""
    lines, prompts = tmp_path / "runs.jsonl", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two", "output_tokens": 2}\n{"prompt": "three"}\n')
    ramp = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "50", "--ramp-up-end-rps", "100")
    runs_of = {
        "a": ("--backend", "sglang", "--input-len", "4", "--output-len", "3", "--num-prompts", "5",
              "--top-k", "7", *ramp),
        "b": ("--backend", "sglang-oai-chat", "--dataset-name", "custom", "--dataset-path", str(prompts),
              "--custom-output-len", "4", "--percentile-metrics", "ttft,itl"),
        "c": ("--dataset-name", "random-ids", "--tokenizer", "nano", "--num-prompts", "2", *SMALL),
    }  # fmt: skip
    with running(SseServer(first_delay=0.01)) as server:
        common = ("--base-url", server.url, "--output-file", str(lines), "--output-details", "--warmup-requests", "0")
        for label, options in runs_of.items():
            code, out, err = command(*common, "--label", label, *options)
            assert code == 0, err
            assert "Max ITL (ms):" in out and "Mean TTFT (ms):" in out
            assert ("Mean E2EL (ms):" in out) == (label != "b")
        assert server.seen[0].body["top_k"] == 7 and server.seen[5].path == "/v1/chat/completions"
        prompts_of_ids = [seen.body["prompt"] for seen in server.seen[7:]]
        assert [len(prompt) for prompt in prompts_of_ids] == [6, 6] and isinstance(prompts_of_ids[0][0], int)
    runs = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [run["label"] for run in runs] == ["a", "b", "c"]
    assert [run["request_rate"] for run in runs] == ["ramp", "inf", "inf"] and runs[0]["ramp_up_end_rps"] == 100
    assert runs[0]["output_lens"] == [3] * 5 and runs[1]["output_lens"] == [4, 4]
    assert len(runs[0]["ttfts"]) == 5 and min(runs[0]["ttfts"]) >= 0.01
    gaps = [gap for itl in runs[0]["itls"] for gap in itl]
    assert runs[0]["p100_itl_ms"] == pytest.approx(max(gaps) * 1e3)
    assert runs[0]["p95_itl_ms"] == pytest.approx(np.percentile(gaps, 95) * 1e3)


def test_failures_are_counted_and_only_total_failure_is_an_error(command: Command) -> None:
    with running(SseServer(faults={1: "busy", 3: "busy", 4: "error"})) as server:
        code, out, _ = command("--base-url", server.url, "--num-prompts", "6", *SMALL, "--max-concurrency", "1")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0 and "Successful requests: 3" in lines and "Failed requests: 3" in lines
    at = lines.index("HTTP 429: 2")
    assert lines[at + 1 : at + 4] == ["first: too many requests", "error in the stream: 1", "first: the engine stopped"]
    with running(SseServer(fault="busy")) as server:
        code, out, _ = command("--base-url", server.url, "--num-prompts", "3", *SMALL, "--num-warmups", "0")
        assert code == 1 and "HTTP 429:" in out and "n/a" in out
        code, out, err = command("--base-url", server.url, "--num-prompts", "3", *SMALL)
        assert (code, out, err) == (1, "", "error: warm-up failed: HTTP 429: too many requests\n")
    with running(SseServer(fault="locked")) as server:
        code, _, err = command("--base-url", server.url, *SMALL)
        assert (code, err) == (1, f"error: {server.url}/v1/models: HTTP 401: wrong key\n")
    code, _, err = command("--base-url", server.url, *SMALL)
    assert code == 1 and "/v1/models" in err and "Traceback" not in err


def test_results_are_recorded_only_on_request(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["deepinfer", "bench", "serve", "--api-key", "abc", "--api-key=abc"])
    with running(SseServer()) as server:
        common = ("--base-url", server.url, "--num-prompts", "3", *SMALL)
        assert command(*common)[0] == 0 and not list(tmp_path.iterdir())
        assert command(*common, "--record", "made-up server", "--save-result", "--result-dir", "runs")[0] == 0
    records = {record.name: record for record in load_records(tmp_path / "benchmarks" / "results" / "serve.json")}
    assert records["made-up server: output token throughput"].unit == "tok/s"
    assert "made-up server: request goodput" not in records
    assert records["made-up server: median TTFT"].command == "deepinfer bench serve --api-key ... --api-key=..."
    (saved,) = (tmp_path / "runs").glob("openai-made-up-*.json")
    figures = json.loads(saved.read_text())
    assert "samples" not in figures
    assert records["made-up server: median ITL"].value == figures["median_itl_ms"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "x"], "--backend must be one of openai, openai-chat"),
        (["--backend", "openai-chat", "--dataset-name", "random-ids"], "use --backend openai"),
        (["--dataset-name", "random-ids"], "needs --tokenizer"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-start-rps"),
        (["--ramp-up-strategy", "x", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2"], "linear or exponential"),
        (["--percentile-metrics", "x"], "--percentile-metrics must be some of ttft, tpot, itl, e2el"),
        (["--dataset-name", "x"], "--dataset-name must be one of random"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--base-url", "localhost:8000"], "--base-url must start with http"),
        (["--request-rate", "0"], "--request-rate and --burstiness must be above 0"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--goodput", "ttft"], "--goodput must be METRIC:MS"),
        (["--extra-body", "[]"], "--extra-body must be a JSON object"),
        (["--metadata", "x"], "--metadata must be KEY=VALUE"),
        (["--metric-percentiles", "200"], "--metric-percentiles"),
        (["--tokenizer", "x"], "--tokenizer must be"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_bad_options_are_named(command: Command, arguments: list[str], message: str) -> None:
    code, _, err = command(*arguments)
    assert code == 2 and message in err and err.count("\n") == 1


def test_against_deepinfer_serve(command: Command, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    out = tmp_path / "out.json"
    server = start_server(checkpoint, "--api-key", "key")
    try:
        for backend in ("openai", "openai-chat"):
            code, _, err = command(
                "--base-url", server.url, "--api-key", "key", "--backend", backend, "--num-prompts", "6",
                "--max-concurrency", "3", "--random-input-len", "40", "--random-output-len", "8", "--ignore-eos",
                "--tokenizer", str(checkpoint), "--output-json", str(out), "--flush-cache",
            )  # fmt: skip
            assert code == 0, err
            saved: dict[str, Any] = json.loads(out.read_text())
            assert saved["model_id"] == "tiny" and saved["completed"] == 6
            assert saved["total_output_tokens"] == 6 * 8
            begin = 1  # the server puts a begin token before a completion's prompt
            assert backend == "openai-chat" or saved["total_input_tokens"] == 6 * (40 + begin)
            assert 0 < saved["median_ttft_ms"] < saved["median_e2el_ms"]
    finally:
        server.process.terminate()
        server.process.wait(30)
