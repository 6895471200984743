"""`deepinfer recipe check`: what it prints and how it exits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent / "golden" / "recipe"


def check(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deepinfer.cli", "recipe", "check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_vectors_that_pass() -> None:
    answer = check(GOLDEN / "parse_thinking.json", GOLDEN / "render_format.json")
    assert answer.returncode == 0, answer.stdout
    assert answer.stdout.splitlines()[-1] == "18 passed, 0 failed"


def test_a_difference_is_named_and_fails(tmp_path: Path) -> None:
    data = json.loads((GOLDEN / "render_tools.json").read_text())
    wrong, broken = data["vectors"][0], data["vectors"][1]
    wrong["expected_prompt"] = wrong["expected_prompt"].replace("Tools", "Tulips")
    del broken["expected_conversation"]
    (tmp_path / "vectors.json").write_text(json.dumps(data))
    answer = check(tmp_path / "vectors.json", GOLDEN / "parse_stop.json")
    assert answer.returncode == 1
    failed = [line for line in answer.stdout.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 2 and answer.stdout.splitlines()[-1].endswith("passed, 2 failed")
    assert failed[0].startswith(f"failed: {wrong['name']}: expected_prompt: ") and "Tulips" in failed[0]
    assert failed[1].startswith(f"failed: {broken['name']}: not a render vector")


@pytest.mark.parametrize("content", ["", "[]", '{"meta": {"kind": "x"}, "vectors": []}'])
def test_a_file_that_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    answer = check(path)
    assert answer.returncode == 2 and "other.json" in answer.stderr and "Traceback" not in answer.stderr
    assert check(tmp_path / "absent.json").returncode == 2
