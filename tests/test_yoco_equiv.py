"""examples/yoco/yoco_equiv.py passes on the tiny model over one and two processes, and fails when the modes differ."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from deepinfer.models.layers import yoco
from tests.checkpoints import write_tiny_checkpoint

SCRIPT = Path(__file__).parent.parent / "examples" / "yoco" / "yoco_equiv.py"
SIZES = ["--prompt-lens", "5,17,40,70", "--chunk-sizes", "30,512,7", "--answer-len", "6"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("yoco") / "tiny"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module, to run it in this process."""
    spec = importlib.util.spec_from_file_location("yoco_equiv", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["yoco_equiv"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("processes", ["1", "2"])
def test_level_1(checkpoint: str, processes: str) -> None:
    answer = run("--level", "1", "--model", checkpoint, "--processes", processes, *SIZES)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    kept = [5, 17, 17, 17]  # of each prompt: window 16 + 1 backtracking token
    queries = 3 * 2 * sum(number + 5 for number in kept)  # 3 chunk sizes; together and alone; 5 decode steps
    assert f"L1 PASS: 15 batches, {queries} kept queries, 0 differences" in answer.stdout


@pytest.mark.parametrize("processes", ["1", "2"])
def test_level_2(checkpoint: str, processes: str) -> None:
    answer = run("--level", "2", "--model", checkpoint, "--processes", processes, *SIZES)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"L2 PASS: 4 prompts, {4 * 6 * 512} log-probabilities" in answer.stdout
    errors = re.findall(r"prompt of (\d+): .* off - compact: largest (\S+),", answer.stdout)
    assert [(int(length), float(error) > 1e-3) for length, error in errors] == [
        (5, False), (17, False), (40, True), (70, True)
    ]  # fmt: skip


def test_too_few_kept_tokens_fail_level_1(checkpoint: str, script: ModuleType, capsys: pytest.CaptureFixture) -> None:
    assert script.main(["--model", checkpoint, "--keep-tokens", "9", *SIZES]) == 1
    assert "L1 FAIL" in capsys.readouterr().out


@pytest.mark.parametrize("level", ["1", "2"])
def test_a_mask_that_forgets_to_narrow_fails(
    level: str, checkpoint: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def forgetful(inputs, window, ring, keep_from):  # type: ignore[no-untyped-def]
        return original(inputs, window, ring)

    original = yoco.prefill_window
    monkeypatch.setattr(yoco, "prefill_window", forgetful)
    assert script.main(["--level", level, "--model", checkpoint, *SIZES]) == 1
    assert f"L{level} FAIL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--level", "2", "--keep-tokens", "16"], "yoco_prefill_keep_tokens must be at least 17"),
        (["--level", "2", "--text", str(SCRIPT), "--prompt-lens", "90000"], "--text is"),
        (["--model", "nowhere"], "model must be"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, checkpoint: str, script: ModuleType, capsys: pytest.CaptureFixture
) -> None:
    assert script.main(["--model", checkpoint, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_help_has_examples() -> None:
    answer = run("--help")
    assert answer.returncode == 0
    assert "examples:" in answer.stdout and "torchrun" in answer.stdout
