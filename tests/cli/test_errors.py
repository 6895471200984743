"""A mistake is one line on stderr that names the field, exit code 2, never a traceback."""

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

from tests.cli.command import Run


def check(answer, *needles: str) -> None:  # type: ignore[no-untyped-def]
    lines = [line for line in answer.stderr.strip().split("\n") if not line.startswith("INFO")]  # a server says more
    assert answer.returncode == 2, answer.stderr
    assert len(lines) == 1 and lines[0].startswith("error: "), answer.stderr
    assert answer.stdout == ""
    for needle in needles:
        assert needle in lines[0], (needle, lines[0])


@pytest.mark.parametrize(
    ("arguments", "needles"),
    [
        (["nonsense"], ["nonsense"]),
        (["generate"], ["prompt"]),
        (["generate", ""], ["prompt"]),
        (["generate", "hi", "--temperature", "nan"], ["temperature"]),
        (["generate", "hi", "--temperature", "hot"], ["--temperature", "number"]),
        (["generate", "hi", "--temperature", "-1"], ["temperature", "-1"]),
        (["generate", "hi", "--max-tokens", "-3"], ["max_tokens", "-3"]),
        (["generate", "hi", "--top-p", "2"], ["top_p"]),
        (["generate", "hi", "--logprobs", "50"], ["logprobs", "20"]),
        (["generate", "hi", "--logit-bias", "x"], ["--logit-bias", "TOKEN_ID:VALUE"]),
        (["generate", "hi", "--golden-token-ids", "1,b"], ["--golden-token-ids"]),
        (["generate", "hi", "--no-such-option"], ["--no-such-option"]),
        (["generate", "hi", "--model", "unknown"], ["model", "unknown", "nano"]),
        (["generate", "hi", "--max-model-len", "many"], ["--max-model-len", "25.6k"]),
        (["generate", "hi", "--kv-cache-dtype", "int3"], ["kv_cache_dtype", "fp8"]),
        (["generate", "hi", "--device", "gpu9"], ["device", "gpu9", "cuda:N"]),
        pytest.param(
            ["generate", "hi", "--device", "cuda"],
            ["device", "cuda", "cpu"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device"),
        ),
        (["chat", "--quick", ""], ["--quick"]),
        (["chat", "--model", "unknown", "-q", "hi"], ["model", "unknown"]),
        (["serve", "--port", "99999"], ["--port", "65535"]),
        (["serve", "--api-key", ""], ["--api-key"]),
        (["serve", "--log-level", "loud"], ["--log-level", "debug"]),
        (["serve", "--model", "unknown", "--port", "0"], ["model", "unknown"]),
        (["serve", "--config", "missing.yaml"], ["--config", "missing.yaml"]),
        (["serve", "--host", "256.1.1.1"], ["--host"]),
        (["serve", "--uds", ""], ["--uds"]),
        (["serve", "--swap-memory", "9" * 400], ["--swap-memory", "141GB"]),
        (["serve", "--prefill-step-ms", "nan"], ["prefill_step_ms", "> 0"]),
        (["serve", "--ssl-cert-reqs", "2"], ["--ssl-certfile"]),
        (["plan", "unknown"], ["unknown"]),
        (["plan", "nano", "--gpu-memory", "lots"], ["--gpu-memory", "141GB"]),
        (["plan", "nano", "--gpus", "0"], ["--gpus"]),
        (["bench", "report", "nothing"], ["area", "all"]),
        (["bench", "latency", "--batch-sizes", "many"], ["--batch-sizes", "many"]),
    ],
    ids=lambda value: " ".join(value)[:50],
)
def test_bad_arguments(run: Run, arguments: list[str], needles: list[str]) -> None:
    check(run(*arguments), *needles)


def test_bad_prompts(run: Run, checkpoint: Path) -> None:
    options = ("generate", "--model", str(checkpoint), "--prompt-ids")
    check(run(*options, "0,512"), "prompt", "512")
    check(run(*options, "0,-1"), "prompt", "-1")
    check(run(*options, "a,b"), "prompt")
    check(run(*options, ",".join(["50"] * 1024)), "prompt", "1024")
    check(run("generate", "--model", str(checkpoint), "-", stdin=""), "prompt")


def test_structured_output_is_named_by_its_option(run: Run) -> None:
    endless = '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'
    check(run("generate", "hi", "--json-schema", endless), "--json-schema", "no finite value satisfies #")
    check(run("generate", "hi", "--json-schema", '{"not": {}}'), "--json-schema", "'not' at #/not")
    check(run("generate", "hi", "--regex", "("), "--regex", "unclosed group")
    check(run("generate", "hi", "--grammar", 'root ::= "a" root'), "--grammar", "rule 'root'")
    check(run("generate", "hi", "--grammar", "a", "--regex", "b"), "--regex", "--grammar")
    check(run("generate", "hi", "--regex", ""), "--regex", "non-empty")


def test_broken_checkpoints(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        return Path(shutil.copytree(checkpoint, tmp_path / name))

    truncated = broken("truncated")
    shard = next(truncated.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    check(run("generate", "hi", "--model", str(truncated)), shard.name)

    wrong = broken("wrong")
    config = wrong / "config.json"
    text = config.read_text()
    assert '"hidden_size": 128' in text
    config.write_text(text.replace('"hidden_size": 128', '"hidden_size": -5'))
    check(run("generate", "hi", "--model", str(wrong)), "hidden_size", "-5")
    config.write_text("{")
    check(run("generate", "hi", "--model", str(wrong)), "config.json")

    silent = broken("silent")
    (silent / "tokenizer.json").unlink()
    check(run("chat", "-q", "hi", "--model", str(silent)), "tokenizer.json")


def test_a_config_file_is_read_and_checked(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("model: unknown-from-file\nport: 0\n")
    check(run("serve", "--config", str(path)), "unknown-from-file")
    check(run("serve", "--config", str(path), "--model", "from-the-command-line"), "from-the-command-line")
    path.write_text("modle: nano\n")
    check(run("serve", "--config", str(path)), "modle", "model")
    path.write_text("[1, 2")
    check(run("serve", "--config", str(path)), str(path))
    path.write_text("port: 70000\n")
    check(run("serve", "--config", str(path)), str(path), "port", "65535")
    path.write_text("port: [1]\n")
    check(run("serve", "--config", str(path)), str(path), "port", "one value")
    path.write_text("api-key: 5\n")
    check(run("serve", "--config", str(path)), str(path), "api-key", "quotes")
    path.write_text("api-key: secret\nmodel: unknown-beside-a-key\n")
    check(run("serve", "--config", str(path)), "unknown-beside-a-key")
    path.with_suffix(".toml").write_text('max-model-len = "some"\n')
    check(run("serve", "--config", str(path.with_suffix(".toml"))), "--max-model-len", "some")


def test_the_example_config_file_is_read(run: Run) -> None:
    check(run("serve", "--config", "examples/server.yaml", "--model", "unknown"), "unknown")


def test_no_longer_sequences_than_the_model_has(run: Run, checkpoint: Path) -> None:
    for command in (["generate", "hi"], ["chat", "-q", "hi"], ["serve", "--port", "0"]):
        check(run(*command, "--model", str(checkpoint), "--max-model-len", "1M"), "max_model_len", "1024", "1048576")


def test_throughput_without_transformers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    check(run("bench", "throughput", "--quick"), "transformers", "[dev]")


def test_a_taken_port(run: Run, checkpoint: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        check(run("serve", "--model", str(checkpoint), "--port", port), "--port", port)


def test_in_a_process_of_its_own(run_process: Run) -> None:
    check(run_process("generate", "hi", "--temperature", "nan"), "temperature")


def test_bad_environment_variables(run_process: Run) -> None:
    check(run_process("generate", "hi", DEEPINFER_KERNELS="refrence"), "DEEPINFER_KERNELS", "auto, reference")


def test_debug_shows_the_traceback(run_process: Run) -> None:
    answer = run_process("--debug", "generate", "hi", "--temperature", "nan")
    assert answer.returncode == 1 and "Traceback" in answer.stderr
    assert "Traceback" in run_process("generate", "hi", "--temperature", "nan", DEEPINFER_DEBUG="1").stderr
