"""`deepinfer bench yoco` measures a truncated and a full prefill of one model."""

from pathlib import Path
from statistics import median

import pytest

from deepinfer.bench import yoco


def test_a_record_compares_both_modes() -> None:
    options = yoco.parser().parse_args(["--prompt-len", "300"])
    record = yoco.measure_time(options, 2, "deepinfer bench yoco")
    assert record.value == median(sample["compact"] for sample in record.samples)
    assert record.baseline_value == median(sample["off"] for sample in record.samples)
    assert record.ratio is not None and 0 < record.ratio < 1.5
    assert (record.met, record.target) == (record.ratio <= 0.62, 0.62)


def test_a_synthetic_model_is_named() -> None:
    options = yoco.parser().parse_args("--prompt-len 200 --synthetic v41-small --layers 4 --chunk 64".split())
    record = yoco.measure_time(options, 1, "deepinfer bench yoco")
    assert record.name == "prefill of 200 tokens, YoCo compact (v41-small shape, 4 layers)"


def test_quick_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    yoco.main(["--quick", "--prompt-len", "150"])
    assert "x off" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_length_is_named(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        yoco.main(["--prompt-len", "0"])
    assert "--prompt-len" in capsys.readouterr().err
