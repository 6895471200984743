"""Result records, the report and the tables in the documentation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepinfer.bench.report import figure, markdown_table, print_report, update_documents
from deepinfer.bench.results import Record, cpu_device_name, load, load_all, measured, median_of, save

FIELDS = {
    "name", "part", "unit", "value", "baseline_name", "baseline_value", "ratio", "target", "higher_is_better",
    "device", "command", "versions", "date", "commit", "samples",
}  # fmt: skip


def record(name: str = "decode", value: float = 30.0, **changes) -> Record:  # type: ignore[no-untyped-def]
    values = {"part": "1", "unit": "tok/s", "command": "deepinfer bench", "baseline_name": "other", "device": "cpu"}
    values |= {"baseline_value": 10.0, "target": 2.0, "samples": [29.0, 30.0, 31.0]}
    return measured(name, value=value, **(values | changes))


def test_a_record_has_the_fields_of_the_format(tmp_path: Path) -> None:
    path = save("speed", [record()], tmp_path)
    (entry,) = json.loads(path.read_text())
    assert set(entry) == FIELDS
    assert entry["ratio"] == 3.0 and entry["versions"]["python"] and entry["date"].endswith("Z")
    assert load(path) == [Record(**entry)]


def test_a_command_names_files_as_the_repository_does() -> None:
    assert record(command=f"deepinfer bench --prompts {Path.cwd()}/a/b").command == "deepinfer bench --prompts a/b"


def test_a_newer_record_replaces_the_one_of_the_same_name_and_device(tmp_path: Path) -> None:
    save("speed", [record(value=30), record(name="prefill"), record(value=90, device="gpu")], tmp_path)
    path = save("speed", [record(value=5.0)], tmp_path)
    assert [(one.name, one.device, one.value) for one in load(path)] == [
        ("decode", "cpu", 5.0), ("prefill", "cpu", 30.0), ("decode", "gpu", 90),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, True),
        ({"target": 3.5}, False),
        ({"target": None}, None),
        ({"higher_is_better": False}, False),
        ({"higher_is_better": False, "target": 3.0}, True),
        ({"baseline_value": None, "target": 29.0}, True),
        ({"baseline_value": None, "target": 31.0}, False),
    ],
)
def test_met(changes: dict, met: bool | None) -> None:
    assert record(**changes).met is met


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"name": "x"}]', "nonsense"])
def test_a_file_of_another_shape_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="bad.json"):
        load(path)


def test_the_median_of_samples_keeps_them() -> None:
    found = median_of("decode", [3.0, 1.0, 8.0], part="1", unit="ms", command="c", higher_is_better=False, target=4)
    assert (found.value, found.samples, found.met) == (3.0, [3.0, 1.0, 8.0], True)


def test_figures() -> None:
    values = [0, 0.0123456, 0.62, 1.234, 12.34, 1234.5, 123456.7]
    assert [figure(value) for value in values] == ["0", "0.012", "0.620", "1.23", "12.3", "1,234", "123,457"]


def test_tables_in_documents_are_regenerated(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results:speed -->\nold\n<!-- /results -->\nafter\n")
    save("speed", [record(), record(name="slow | one", value=1.0)], tmp_path)
    results = load_all(tmp_path)
    assert update_documents(tmp_path, results, write=False) == [readme]
    assert "old" in readme.read_text()
    assert update_documents(tmp_path, results) == [readme]
    text = readme.read_text()
    assert text.startswith("before\n<!-- results:speed -->\n| name |") and text.endswith("<!-- /results -->\nafter\n")
    assert "| decode | 30.0 tok/s | ≥ 2.00 × | 10.0 tok/s (other) | 3.00 × | yes | cpu |" in text
    assert "| slow \\| one | 1.00 tok/s | ≥ 2.00 × | 10.0 tok/s (other) | 0.100 × | no | cpu |" in text
    assert update_documents(tmp_path, results) == []


def test_a_document_says_which_run_measured_an_area(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "kernels" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text("<!-- provenance:speed -->\n<!-- /provenance -->\n")
    run = {"command": "bench", "commit": "abc1234+", "date": "2026-11-30T12:00:00Z"}
    records = [replace(one, **run) for one in (record(), record(name="slow", value=1.0))] + [record(name="other run")]
    save("speed", records, tmp_path)
    assert update_documents(tmp_path, load_all(tmp_path)) == [page]
    rows = page.read_text().splitlines()
    assert rows[3] == "| `bench` | abc1234+ | 2026-11-30 | cpu | 2 | 1 |"
    assert len(rows) == 6 and rows[4].endswith("| cpu | 1 | — |")


@pytest.mark.parametrize("width", [80, 60])
def test_a_narrow_terminal_gets_whole_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    long = "tokens a second of a decode step with sixty-four sequences and a context of eight thousand tokens"
    bare = record(name="bare", baseline_value=None, target=None)
    save("speed", [record(), record(name=long, value=1.0), bare], tmp_path)
    print_report("speed", tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width and lines[0] == "cpu"
    text = " ".join(line.strip() for line in lines)
    assert "decode 30.0 tok/s, 3.00 × of 10.0 tok/s (other), target ≥ 2.00 ×: met" in text
    assert long in text and "not met" in text and "tok/s" in lines[-1] and "target" not in lines[-1]


@pytest.mark.parametrize(("threads", "words"), [(1, "1 thread"), (2, "2 threads")])
def test_a_device_counts_its_threads(threads: int, words: str) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert cpu_device_name().endswith(f", {words}")
    finally:
        torch.set_num_threads(before)


def test_an_empty_area_says_so() -> None:
    assert "No results" in markdown_table([])
