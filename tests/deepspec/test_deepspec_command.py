"""`deepinfer deepspec` from end to end, on a Qwen3-style model with random weights and on a tiny V4.1 checkpoint."""

from __future__ import annotations

import json

import pytest

from deepinfer.cli import main
from deepinfer.models.layers.engram_map import compressed_token_map
from deepinfer.models.random_weights import random_weights
from deepinfer.models.writer import write_checkpoint
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


@pytest.mark.parametrize("algorithm", ["dspark", "eagle3"])
def test_hugging_face_model(qwen, tasks, tmp_path, capsys, algorithm):
    data, draft = tmp_path / "data", tmp_path / "draft"
    run("prepare", "--target", qwen, "--tasks", tasks, "--out", data, "--cache", "--rows-a-shard", 3, *SIZES)
    printed = capsys.readouterr().out
    assert "5 rows of 96 tokens" in printed
    assert "bytes a token" in printed  # 2 taps and the final state of 64, and the tokens
    assert len(list((data / "cache").glob("*.safetensors"))) == 2
    options = ["--steps", 3, "--batch", 2, "--anchors", 8, "--block-size", 3, "--length", 96]
    run("train", "--target", qwen, "--data", data, "--out", draft, "--algorithm", algorithm, *options)
    run("eval", "--target", qwen, "--draft", draft, "--tasks", tasks, "--out", tmp_path / "eval", *SIZES)
    sets = json.loads((tmp_path / "eval" / "eval.json").read_text())["sets"]
    assert set(sets) == {"gsm8k", "humaneval", "all"}
    assert sets["all"]["rounds"] == sets["gsm8k"]["rounds"] + sets["humaneval"]["rounds"]
    assert 1 <= sets["all"]["mean_length"] <= 4 and sets["all"]["speed_up"] > 0
    if algorithm == "dspark":
        run("calibrate", "--target", qwen, "--draft", draft, "--tasks", tasks, "--out", tmp_path / "eval", *SIZES)
        saved = json.loads((draft / "draft_calibration.json").read_text())["temperatures"]
        assert len(saved) == 3 and all(heat > 0 for heat in saved)


def test_v41_checkpoint_with_its_head(v41, tasks, tmp_path, capsys):
    """The engine answers, the head in the released layout drafts, its calibration lies beside it."""
    run("eval", "--target", v41, "--tasks", tasks, "--out", tmp_path, "--temperature", 1, *SIZES)
    sets = json.loads((tmp_path / "eval.json").read_text())["sets"]
    assert sets["all"]["speed_up"] > 0 and len(sets["all"]["by_position"]) == 3
    run("calibrate", "--target", v41, "--tasks", tasks, "--out", tmp_path, *SIZES)
    assert "expected calibration error" in capsys.readouterr().out
    assert len(json.loads((v41 / "draft_calibration.json").read_text())["temperatures"]) == 3


def test_mistakes_are_one_line(tmp_path, qwen, tasks, capsys):
    for arguments, message in (
        (["train", "--data", tmp_path, "--out", tmp_path], "data: no answers in"),
        (["eval", "--target", qwen, "--draft", tmp_path, "--tasks", tasks, "--out", tmp_path / "a"], "draft: neither"),
        (["prepare", "--tasks", tmp_path / "none", "--out", tmp_path], "is not a folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["deepspec", *map(str, arguments)])
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert ended.value.code == 2 and message in error and error.startswith("error:")
