"""The commands on a tiny random checkpoint, compared with the offline API."""

import json
import re
import resource
import shutil
from pathlib import Path

import pytest

from deepinfer import LLM, SamplingParams
from tests.cli.command import Run

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint)


def test_generate_prints_what_the_offline_api_returns(run: Run, checkpoint: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = llm.generate(PROMPT, params)[0].outputs[0]
    options = ("generate", "--model", str(checkpoint), "-t", "0", "--max-tokens", "20")
    assert run(*options, PROMPT).stdout == expected.text + "\n"
    assert run(*options, "-", stdin=PROMPT).stdout == expected.text + "\n"
    assert run(*options, "--ids", PROMPT).stdout.split() == [str(token_id) for token_id in expected.token_ids]
    stop = expected.text[8:11]
    assert run(*options, "--stop", stop, PROMPT).stdout == expected.text[: expected.text.index(stop)] + "\n"


def test_generate_takes_token_ids_and_gives_logprobs(run: Run, checkpoint: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
    expected = llm.generate([0, 50, 60], params)[0].outputs[0].logprobs
    answer = run(
        "generate", "--model", str(checkpoint), "-t", "0", "--max-tokens", "4", "--logprobs", "2", "--prompt-ids",
        "0, 50, 60",
    )  # fmt: skip
    assert expected is not None and answer.returncode == 0, answer.stderr
    lines = answer.stdout.split("\n")[:4]
    for line, item in zip(lines, expected, strict=True):
        assert line.startswith(f"{item.token_id} ") and f"{item.logprob:.4f}" in line
        assert line.count("  |  ") == 2


def test_generate_repeats_with_a_seed(run: Run, checkpoint: Path) -> None:
    options = ("generate", "--model", str(checkpoint), "--max-tokens", "12", "-n", "2", PROMPT)
    first = run(*options, "--seed", "3")
    assert first.returncode == 0 and "--- 2 of 2" in first.stdout
    assert first.stdout == run(*options, "--seed", "3").stdout != run(*options, "--seed", "4").stdout


def test_chat_answers_one_question(run: Run, checkpoint: Path) -> None:
    answer = run("chat", "--model", str(checkpoint), "--quick", "hi", "--max-tokens", "12", "-t", "0", "--stats")
    assert answer.returncode == 0, answer.stderr
    text, stats = answer.stdout.rstrip("\n").rsplit("\n", 1)
    assert text
    assert re.fullmatch(r"\[\d+ prompt tokens, 12 generated, TTFT \d+ ms, [\d.]+ tok/s\]", stats)


def test_chat_remembers_and_resets(run: Run, checkpoint: Path) -> None:
    """The same question: a longer prompt in one conversation, the same prompt after /reset."""
    script = "hello\nhello\n/reset\nhello\n/what\n/exit\n"
    answer = run(
        "chat", "--model", str(checkpoint), "--max-tokens", "4", "-t", "0", "--stats", "--system", "Be brief.",
        stdin=script,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    first, second, third = (int(count) for count in re.findall(r"\[(\d+) prompt tokens", answer.stdout))
    assert first < second and first == third
    assert answer.stdout.count("/exit leaves") == 2


def test_chat_survives_a_conversation_that_no_longer_fits(run: Run, checkpoint: Path) -> None:
    script = "word " * 2000 + "\nhello\n"
    answer = run("chat", "--model", str(checkpoint), "--max-tokens", "4", "--stats", stdin=script)
    assert answer.returncode == 0
    assert "context" in answer.stderr and len(answer.stderr.strip().split("\n")) == 1
    assert answer.stdout.count("4 generated") == 1


def test_thinking_goes_into_the_prompt(run: Run, checkpoint: Path) -> None:
    options = ("chat", "--model", str(checkpoint), "-q", "hi", "--max-tokens", "3", "--stats")
    plain, thinking = (re.search(r"\[(\d+) prompt", run(*options, *more).stdout) for more in ((), ("--thinking",)))
    assert plain is not None and thinking is not None and int(thinking[1]) > int(plain[1])


def test_generate_is_called_complete_too(run: Run, checkpoint: Path) -> None:
    options = ("--model", str(checkpoint), "-t", "0", "--max-tokens", "5", PROMPT)
    assert run("complete", *options).stdout == run("generate", *options).stdout


def test_the_model_recommends_sampling_parameters(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """Greedy by generation_config.json; what is given on the command line wins; a broken file is named."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    (model / "generation_config.json").write_text('{"temperature": 0.0, "eos_token_id": 1}')
    for command in ("generate", "chat"):
        words = ("--max-tokens", "12", PROMPT) if command == "generate" else ("--max-tokens", "12", "-q", PROMPT)
        recommended = run(command, "--model", str(model), *words).stdout
        assert recommended == run(command, "--model", str(checkpoint), "-t", "0", *words).stdout
        sampled = ("-t", "1", "--seed", "3", *words)
        given = run(command, "--model", str(model), *sampled).stdout
        assert given == run(command, "--model", str(checkpoint), *sampled).stdout != recommended
        assert given == run(command, "--model", str(checkpoint), "--seed", "3", *words).stdout, "the default is 1"
    (model / "generation_config.json").write_text("[")
    refused = run("generate", "--model", str(model), PROMPT)
    assert refused.returncode == 2 and "generation_config.json" in refused.stderr


def test_a_file_of_requests(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    name, asked, answers = checkpoint.name, tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    sampling = {"model": name, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    bodies = [
        ("/v1/completions", sampling | {"prompt": PROMPT, "return_token_ids": True, "stream": True}),
        ("/v1/chat/completions", sampling | {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", sampling | {"prompt": PROMPT, "temperature": -1}),
    ]
    lines = [json.dumps({"custom_id": f"r{i}", "url": url, "body": body}) for i, (url, body) in enumerate(bodies)]
    asked.write_text("\n\n".join(lines))
    options = ("run-batch", "-i", str(asked), "-o", str(answers), "--model", str(checkpoint))
    done = run(*options)
    assert done.returncode == 1 and "2 answered, 1 failed" in done.stderr
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [entry["custom_id"] for entry in found] == ["r0", "r1", "r2"]
    assert [entry["response"]["status_code"] for entry in found] == [200, 200, 400]
    ids = run("generate", "--model", str(checkpoint), "-t", "0", "--max-tokens", "4", "--ignore-eos", "--ids", PROMPT)
    assert found[0]["response"]["body"]["choices"][0]["token_ids"] == [int(part) for part in ids.stdout.split()]
    assert found[1]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert found[2]["response"]["body"]["error"]["param"] == "temperature"
    for line, needle in (("{", "not JSON"), ("{}", "custom_id"), ('{"custom_id": "a", "url": "/x"}', "/v1/responses")):
        asked.write_text(lines[0] + "\n" + line)
        refused = run(*options)
        assert refused.returncode == 2 and "line 2" in refused.stderr and needle in refused.stderr


def test_doctor_reports_every_group(run: Run) -> None:
    answer = run("doctor", "--json")
    checks = json.loads(answer.stdout)
    groups = {"system", "compiler", "torch", "gpu", "optional", "kernels", "model"}
    assert {check["group"] for check in checks} >= groups
    assert {check["state"] for check in checks} <= {"ok", "no", "fail"}
    assert answer.returncode == (1 if any(check["state"] == "fail" for check in checks) else 0)
    assert json.loads(run("collect-env", "--json").stdout)
    readable = run("doctor")
    assert readable.returncode == answer.returncode and "PyTorch" in readable.stdout


def test_doctor_says_what_is_used_without_a_compiler(run_process: Run, tmp_path: Path) -> None:
    answer = run_process("doctor", "--json", PATH=str(tmp_path), CC="", DEEPINFER_CACHE_DIR=str(tmp_path / "cache"))
    checks = {check["name"]: check for check in json.loads(answer.stdout)}
    assert checks["C compiler"]["state"] == "no" and "PyTorch" in checks["C compiler"]["detail"]
    backend = checks["cpu backend"]
    assert backend["state"] == "no" and backend["detail"].startswith("0 of ") and "all run in" in backend["detail"]


def test_help_is_quick(run_process: Run) -> None:
    """0.25 s on an idle machine; the processor time does not depend on what else runs there."""
    run_process("--help")  # compiles the bytecode
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run_process("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_help_has_examples(run: Run) -> None:
    for command in ("generate", "chat", "serve", "doctor", "plan", "version"):
        text = run(command, "--help").stdout
        assert "Examples" in text and f"deepinfer {command}" in text, command
    assert "deepinfer bench report" in run("bench", "report", "--help").stdout


def test_no_arguments_is_help(run: Run) -> None:
    for arguments in ((), ("bench",), ("recipe",)):
        answer = run(*arguments)
        assert (answer.returncode, answer.stderr) == (0, "") and "Examples" in answer.stdout, arguments
    assert run("--version").stdout == run("version").stdout


def test_version_in_a_process_of_its_own(run_process: Run) -> None:
    from deepinfer import __version__

    assert run_process("version").stdout.startswith(f"deepinfer {__version__} (Python 3.")


def test_bench_latency_measures_and_saves(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = run(
        "bench", "latency", "--model", str(checkpoint), "--batch-sizes", "1,2", "--prompt-lens", "8", "--output-len",
        "3", "--repeats", "2", "--save",
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    records = json.loads((tmp_path / "benchmarks" / "results" / "latency.json").read_text())
    assert [record["unit"] for record in records] == ["ms"] * 4 and len({record["name"] for record in records}) == 4
    assert all(record["value"] > 0 and len(record["samples"]) == 2 for record in records)
    table = run("bench", "report", "latency")
    assert table.returncode == 0 and "TTFT" in table.stdout
