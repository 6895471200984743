"""The figures of draft models: from result files to records and the document."""

from __future__ import annotations

import json

import pytest

from deepinfer.bench.results import load
from deepinfer.train import draft_report as report


def write_run(folder, temperature, drawn, lengths):
    row = {"rounds": 1000, "by_position": [0.5], "speed_up": 1.5}
    sets = {name: {**row, "mean_length": length, "prompt_lookup": length - 1} for name, length in lengths.items()}
    folder.mkdir()
    (folder / "eval.json").write_text(json.dumps({"temperature": temperature, "drawn": drawn, "sets": sets}))
    return str(folder)


@pytest.fixture
def files(tmp_path):
    lengths = {"code": 2.1, "prose": 2.5, "tool": 4.25, "all": 2.75}
    folders = [write_run(tmp_path / "a", 0.0, False, lengths), write_run(tmp_path / "b", 1.0, True, lengths)]
    folders.append(write_run(tmp_path / "c", 0.0, False, {"HumanEval": 3.0, "all": 3.0}))
    errors = {"as trained": 0.25, "calibrated": 0.0625}
    record = {"blocks": 4321, "expected_calibration_error": errors, "temperatures": [1.0]}
    record |= {"draft_temperature": 0.5, "drawn_length": {"as trained": 1.75, "calibrated": 2.125}}
    (tmp_path / "a" / "calibration.json").write_text(json.dumps(record))
    for name, part in (("speculation", "drafts"), ("nano", "draft_training")):
        text = f"before\n<!-- nano:{part} -->\nold\n<!-- /nano:{part} -->\nafter\n"
        (tmp_path / f"{name}.md").write_text(text)
    log = {"rows": 5000, "tokens": 2_050_000, "step": 100, "batch": 20, "anchors": 64, "epochs": 0.4}
    (tmp_path / "draft_training.json").write_text(json.dumps({**log, "seconds": 61.2, "device": "one"}))
    (tmp_path / "draft_training_2.json").write_text(json.dumps({**log, "seconds": 70.0, "device": "two"}))
    paths = ["--runs", str(tmp_path), "--results", str(tmp_path), "--docs", str(tmp_path)]
    return ["--evals", *folders, "--calibration", folders[0], *paths]


def test_records_and_document(files, tmp_path):
    report.main(files)
    text = (tmp_path / "speculation.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| temperature 0 | 1,000 | 2.50 (1.50) | 2.10 (1.10) | 4.25 (3.25) | 2.75 (1.75) |" in text
    assert "| temperature 1, drafts drawn | 1,000 | 2.50" in text
    assert "| HumanEval, temperature 0 | 1,000 | | | | 3.00 (2.00) |" in text
    assert "4,321 blocks" in text and "0.250 as trained and 0.062 calibrated" in text
    assert "1.75 tokens a round" in text and "2.12 at the draft temperature of 0.5." in text
    trained = (tmp_path / "nano.md").read_text()
    assert "| 1 | 5,000 | 1,024 | 100 of 20 x 64 | 2 million | 0.4 | 61 | one |\n| 2 |" in trained
    assert trained.startswith("before\n") and trained.endswith("after\n") and "old" not in trained
    found = {record.name: record for record in load(tmp_path / "drafts.json")}
    assert len(found) == 4 * 2 + 4 + 2 + 1
    assert found["mean accepted length, code, temperature 0 (nano's head)"].met is False
    assert found["mean accepted length, prose, temperature 0 (nano's head)"].met is True
    assert found["mean accepted length, prose, temperature 0 (prompt lookup)"].value == 1.5
    assert found["mean accepted length, all, temperature 1, drafts drawn (nano's head)"].met is None
    human = found["mean accepted length, HumanEval, temperature 0 (nano's head)"]
    assert human.met is None and "TASKS" in human.command
    assert found["expected calibration error of survival"].met is False
    kept = json.loads((tmp_path / "draft_acceptance.json").read_text())
    assert kept[0]["sets"]["tool"]["mean_length"] == 4.25 and "speed_up" not in kept[0]["sets"]["tool"]


def test_a_document_without_its_part_is_refused(files, tmp_path):
    (tmp_path / "speculation.md").write_text("nothing\n")
    with pytest.raises(ValueError, match="must have one"):
        report.main(files)
