"""`deepinfer deepspec` from end to end, on a Qwen3-style model with random weights and on a tiny V4.1 checkpoint."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from deepinfer.cli import main
from deepinfer.deepspec.answers import HuggingFaceWriter, Sampling, read_answers, read_folder
from deepinfer.models.layers.engram_map import compressed_token_map
from deepinfer.models.random_weights import random_weights
from deepinfer.models.writer import write_checkpoint
from deepinfer.recipe import Tokenizer
from tests.checkpoints import write_tokenizer
from tests.configs import tiny_config
from tests.deepspec.tiny_qwen import write_tiny_qwen

SIZES = ["--max-tokens", "16", "--length", "96"]


def run(*arguments) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["deepspec", *map(str, arguments)])
    assert ended.value.code == 0


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    lines = [{"question": f"How many lamps has house {i}?", "answer": "#### 1"} for i in range(4)]
    (folder / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "humaneval.jsonl").write_text(
        json.dumps({"task_id": "HumanEval/0", "entry_point": "add", "prompt": "def add(a, b):\n"}) + "\n"
    )
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write_tiny_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def v41(tmp_path_factory):
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("v41")
    write_tokenizer(folder / "tokenizer.json")
    token_map = compressed_token_map(Tokenizer.from_file(str(folder / "tokenizer.json")))
    config = tiny_config(2, engram_compressed_vocab_size=int(token_map.max()) + 1)
    write_checkpoint(folder, config, random_weights(config, 0), 4 << 20, folder / "tokenizer.json")
    return folder


TRAIN = ["--steps", 4, "--batch", 2, "--anchors", 8, "--block-size", 3, "--save-every", 2]


def prepared(target, tasks, out, *more):
    run("prepare", "--target", target, "--tasks", tasks, "--out", out, "--cache", "--rows-a-shard", 3, *SIZES, *more)
    return out


@pytest.fixture(scope="module")
def data(qwen, tasks, tmp_path_factory):
    return prepared(qwen, tasks, tmp_path_factory.mktemp("data"))


def test_prepare_says_what_it_will_take_and_goes_on(qwen, tasks, data, capsys):
    shards = sorted((data / "cache").glob("*.safetensors"))
    assert len(shards) == 2
    shards[1].unlink()
    kept = shards[0].stat().st_mtime_ns
    (data / "answers" / "humaneval-t0.7.jsonl").unlink()
    before = (data / "answers" / "gsm8k-t0.7.jsonl").read_bytes()
    prepared(qwen, tasks, data)
    printed = capsys.readouterr().out
    assert printed.startswith("5 prompts: hidden states of at most 0.2 MiB")  # before anything is computed
    assert "5 rows of 96 tokens" in printed
    assert f"({(2 + 1) * 64 * 2 + 12} bytes a token)" in printed  # 2 taps and the final state of 64, and the tokens
    assert sorted((data / "cache").glob("*.safetensors")) == shards and shards[0].stat().st_mtime_ns == kept
    assert (data / "answers" / "gsm8k-t0.7.jsonl").read_bytes() == before


@pytest.mark.parametrize("algorithm", ["dflash", "dspark", "eagle3"])
def test_hugging_face_model(qwen, tasks, data, tmp_path, algorithm):
    draft, curve = tmp_path / "draft", tmp_path / "curve.svg"
    run("train", "--target", qwen, "--data", data, "--out", draft, "--algorithm", algorithm, "--plot", curve, *TRAIN)
    assert "<svg" in curve.read_text()
    judged = tmp_path / "eval"
    picture = ["--plot", tmp_path / "sets.svg"]
    run("eval", "--target", qwen, "--draft", draft, "--tasks", tasks, "--out", judged, *picture, *SIZES)
    sets = json.loads((judged / "eval.json").read_text())["sets"]
    assert set(sets) == {"gsm8k", "humaneval", "all"}
    assert sets["all"]["rounds"] == sets["gsm8k"]["rounds"] + sets["humaneval"]["rounds"]
    assert 1 <= sets["all"]["mean_length"] <= 4 and sets["all"]["speed_up"] > 0
    assert 1 <= sets["all"]["prompt_lookup"] <= 4
    assert "<svg" in (tmp_path / "sets.svg").read_text()
    if algorithm == "dspark":
        run("calibrate", "--target", qwen, "--draft", draft, "--tasks", tasks, "--out", judged, *SIZES)
        saved = json.loads((draft / "draft_calibration.json").read_text())["temperatures"]
        assert len(saved) == 3 and all(heat > 0 for heat in saved)
        record = json.loads((judged / "calibration.json").read_text())
        assert record["temperatures"] == saved and 0 <= record["expected_calibration_error"]["calibrated"] < 1


@pytest.mark.parametrize("algorithm", ["dflash", "dspark", "eagle3"])
def test_drafts_for_a_v41_target(v41, tasks, tmp_path, algorithm):
    data, draft = prepared(v41, tasks, tmp_path / "data"), tmp_path / "draft"
    run("train", "--target", v41, "--data", data, "--out", draft, "--algorithm", algorithm, *TRAIN)
    run("eval", "--target", v41, "--draft", draft, "--tasks", tasks, "--out", tmp_path / "eval", *SIZES)
    every = json.loads((tmp_path / "eval" / "eval.json").read_text())["sets"]["all"]
    assert every["rounds"] > 0 and every["speed_up"] > 0


def test_the_answers_of_transformers_do_not_depend_on_their_neighbours(qwen):
    """Prompts of different lengths in one padded batch: what each gets alone, token by token from the logits."""
    writer = HuggingFaceWriter(qwen, "cpu")
    prompts = [[5, 6, 7], list(range(10, 31)), [9]]
    together = writer.write(prompts, Sampling(0.0, 12), 0)
    for prompt, answer in zip(prompts, together, strict=True):
        ids = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(writer.model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert answer == ids[len(prompt) :]
    writer.model.generation_config.eos_token_id = together[1][4]
    assert writer.write(prompts, Sampling(0.0, 12), 0)[1] == together[1][: together[1].index(together[1][4]) + 1]
    drawn = [writer.write(prompts, Sampling(1.0, 12, seed), 0) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_second_turns_are_asked_behind_the_first_answer(qwen, v41, tmp_path):
    """MT-Bench: the prompt of turn 2 holds turn 1, its answer and the question, in the target's own format."""
    (tmp_path / "tasks").mkdir()
    lines = [{"turns": ["Say one thing", "And one more"]}, {"turns": ["Only this"]}]
    (tmp_path / "tasks" / "mt.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, target in (("qwen", qwen), ("v41", v41)):
        out = tmp_path / name
        run("prepare", "--target", target, "--tasks", tmp_path / "tasks", "--out", out, *SIZES)
        first, second = (read_answers(out / "answers" / f"mt{turn}-t0.7.jsonl") for turn in ("", "-turn2"))
        assert (len(first), len(second)) == (2, 1)
        asked, answered = second[0].prompt, first[0].token_ids[len(first[0].prompt) :]
        if name == "v41":
            tokenizer = Tokenizer.from_file(v41 / "tokenizer.json")
            text = tokenizer.decode(asked)
            said = tokenizer.decode(i for i in answered if i not in tokenizer.roles)
            assert text.startswith(tokenizer.decode(first[0].prompt)[:-20]) and text.count("Assistant") == 2
            assert text.index("Say one thing") < text.index("And one more")
            assert said.strip() in text
        else:
            assert asked[: len(first[0].prompt)] == first[0].prompt and len(asked) > len(first[0].prompt) + 10


def test_length_is_that_of_the_cache(qwen, data, tmp_path, capsys):
    run("train", "--target", qwen, "--data", data, "--out", tmp_path / "a", "--length", 96, *TRAIN)
    with pytest.raises(SystemExit) as ended:
        main(
            ["deepspec", *map(str, ["train", "--target", qwen, "--data", data, "--out", tmp_path / "b"])]
            + ["--length", "64"]
        )
    assert ended.value.code == 2 and "length: 64, allowed: 96" in capsys.readouterr().err


def run_twice(*arguments) -> list[str]:
    """What two processes print that run the same command in torchrun's environment, over gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "deepinfer.cli", "deepspec", *map(str, arguments)]

    def start(rank):
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank), **group}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    workers = [start(rank) for rank in range(2)]
    printed = [worker.communicate(timeout=180) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], printed
    return [out for out, _ in printed]


def test_two_processes_prepare_and_train(qwen, tasks, data, tmp_path):
    """Prompts and shards are shared, gradients averaged; one saves and one prints."""
    both = tmp_path / "data"
    options = ["--target", qwen, "--tasks", tasks, "--out", both, "--temperature", 0, "--cache", "--rows-a-shard", 3]
    first, second = run_twice("prepare", *options, *SIZES)
    assert "5 rows of 96 tokens" in first and second == ""
    assert len(list((both / "answers").glob("gsm8k-t0.*-of-2.jsonl"))) == 2
    run("prepare", *[one if one != both else tmp_path / "alone" for one in options], *SIZES)
    asked = [sorted(answer.token_ids for answer in read_folder(folder)) for folder in (both, tmp_path / "alone")]
    assert asked[0] == asked[1]
    shards = [load_file(path) for path in sorted((both / "cache").glob("*.safetensors"))]
    assert [len(shard["tokens"]) for shard in shards] == [3, 2]

    smaller = [*TRAIN, "--batch", 1]
    first, second = run_twice("train", "--target", qwen, "--data", both, "--out", tmp_path / "draft", *smaller)
    assert "step 4" in first and second == ""
    record = json.loads((tmp_path / "draft" / "draft_config.json").read_text())["training"]
    assert record["processes"] == 2 and [point["step"] for point in record["log"]] == [1, 2, 3, 4]
    assert all(torch.isfinite(value).all() for value in load_file(tmp_path / "draft" / "draft.safetensors").values())


def test_a_second_temperature_adds_to_the_data(qwen, tasks, tmp_path, capsys):
    for heat, rows in ((0, 5), (1, 10)):
        prepared(qwen, tasks, tmp_path, "--temperature", heat)
        assert f"{rows} rows of 96 tokens" in capsys.readouterr().out
    cached = [load_file(path)["tokens"] for path in sorted((tmp_path / "cache").glob("*.safetensors"))]
    assert sum(map(len, cached)) == 10


def test_v41_checkpoint_with_its_head(v41, tasks, tmp_path, capsys):
    """The engine answers, the head in the released layout drafts, its calibration lies beside it."""
    run("eval", "--target", v41, "--tasks", tasks, "--out", tmp_path, "--temperature", 1, *SIZES)
    sets = json.loads((tmp_path / "eval.json").read_text())["sets"]
    assert sets["all"]["speed_up"] > 0 and len(sets["all"]["by_position"]) == 3
    run("calibrate", "--target", v41, "--tasks", tasks, "--out", tmp_path, *SIZES)
    assert "expected calibration error" in capsys.readouterr().out
    assert len(json.loads((v41 / "draft_calibration.json").read_text())["temperatures"]) == 3


def mistake(capsys, *arguments) -> str:
    """The one line that a user's mistake is answered with."""
    with pytest.raises(SystemExit) as ended:
        main(["deepspec", *map(str, arguments)])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2 and error.startswith("error:"), error
    return error


def test_mistakes_are_one_line(tmp_path, qwen, v41, tasks, data, capsys):
    (tmp_path / "file").write_text("")
    ask = ["--target", qwen, "--tasks", tasks, "--out", tmp_path / "a"]
    train = ["train", "--target", qwen, "--data", data, "--out", tmp_path / "b"]
    for arguments, message in (
        (["train", "--data", tmp_path, "--out", tmp_path], "data: no answers in"),
        (["eval", *ask, "--draft", tmp_path], "draft: neither"),
        (["eval", *ask], "draft: neither"),
        (["prepare", "--tasks", tmp_path / "none", "--out", tmp_path], "is not a folder"),
        (["prepare", *ask, "--temperature", "inf"], "--temperature"),
        (["prepare", *ask, "--cache", "--length", 10**12], "free in"),  # before the target answers anything
        (["prepare", *ask[:-1], tmp_path / "file"], "out:"),
        ([*train, "--device", "tpu"], "device: 'tpu' for process 0, allowed: cpu"),
        ([*train, "--plot", tmp_path / "curve.txt"], "plot:"),
        ([*train, "--plot", tmp_path / "none" / "curve.svg"], "plot:"),
        ([*train, "--noise-token-id", 512], "noise_token_id: 512, allowed: 0..511"),
        ([*train, "--algorithm", "eagle3", "--num-layers", 2], "num_layers: 2, allowed: 1"),
        ([*train, "--learning-rate", 1e30, *TRAIN], "the gradients of step 2 are no numbers"),
        (["train", "--target", v41, "--data", data, "--out", tmp_path / "b"], "another target wrote"),
    ):
        assert message in mistake(capsys, *arguments)
    assert not (tmp_path / "a" / "answers").exists()
    assert not (tmp_path / "b" / "draft.safetensors").exists()


def test_caches_that_are_not_whole_are_refused(qwen, data, tmp_path, capsys):
    """A shard that is missing, cut off, without hidden states or of another target: `prepare` makes it again."""
    train = ["train", "--target", qwen, "--data", data, "--out", tmp_path, *TRAIN]
    first, second = sorted((data / "cache").glob("*.safetensors"))
    kept = {path: path.read_bytes() for path in (first, second)}
    second.unlink()
    assert "cache: 1 shards of 2" in mistake(capsys, *train)
    second.write_bytes(kept[second][:2000])
    assert "cannot be read" in mistake(capsys, *train)
    with safe_open(first, framework="pt") as shard:
        whose, tensors = shard.metadata(), load_file(first)
    for wrong, metadata, message in (
        ({name: value for name, value in tensors.items() if name != "taps"}, whose, "cannot be read"),
        ({**tensors, "taps": tensors["taps"][..., :-1].contiguous()}, whose, "another target"),
        (tensors, {"target": "0123456789abcdef"}, "another target"),
    ):
        second.write_bytes(kept[second])
        save_file(wrong, first, metadata=metadata)
        assert message in mistake(capsys, *train)
        first.write_bytes(kept[first])
    save_file({**tensors, "taps": tensors["taps"] * float("nan")}, first, metadata=whose)
    save_file({**load_file(second), "taps": load_file(second)["taps"] * float("nan")}, second, metadata=whose)
    assert "no numbers" in mistake(capsys, *train)
    for path, whole in kept.items():
        path.write_bytes(whole)


def test_answers_of_another_number_of_processes(qwen, tasks, tmp_path, capsys):
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "gsm8k-t0.7.0-of-2.jsonl").write_text("{}\n")
    error = mistake(capsys, "prepare", "--target", qwen, "--tasks", tasks, "--out", tmp_path, *SIZES)
    assert "was begun by 2 processes" in error


def test_a_run_that_was_stopped_has_the_answers_of_one_that_was_not(qwen, tmp_path):
    """Drawn by `transformers`, whose prompts share a random stream: stopped within a group and between two."""
    (tmp_path / "tasks").mkdir()
    lines = [json.dumps({"question": f"How many lamps has house {i}?"}) + "\n" for i in range(40)]
    (tmp_path / "tasks" / "set.jsonl").write_text("".join(lines))
    ask = ["prepare", "--target", qwen, "--tasks", tmp_path / "tasks", "--out", tmp_path, *SIZES, "--temperature", 1]
    run(*ask)
    path = tmp_path / "answers" / "set-t1.jsonl"
    whole = path.read_text()
    for kept in (37, 10):
        path.write_text("".join(whole.splitlines(keepends=True)[:kept])[:-5])
        run(*ask)
        assert path.read_text() == whole
