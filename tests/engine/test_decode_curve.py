"""The decode curve: interpolation, and a cache on disk that survives damage and never serves a foreign curve."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.decode_curve import DecodeCurve, load_or_measure
from deepinfer.engine.runner import ModelRunner
from deepinfer.kernels import registry
from tests.engine.test_engine_matches_reference import model

KEY = {"model": "a", "card": "b", "max_num_seqs": 8}
TIMES = {1: 2.0, 2: 2.5, 8: 4.0}
points = st.dictionaries(st.integers(1, 512), st.floats(0.01, 1e4), min_size=1)


@given(points, st.data())
def test_between_the_points_it_is_linear(times: dict[int, float], data: st.DataObject) -> None:
    curve = DecodeCurve(tuple(sorted(times.items())))
    batch = data.draw(st.integers(1, max(times)))
    sizes = sorted(times)
    assert curve.step_ms(batch) == pytest.approx(np.interp(batch, sizes, [times[size] for size in sizes]))


def test_beyond_the_points() -> None:
    assert DecodeCurve(((1, 2.0), (4, 5.0))).step_ms(8) == pytest.approx(9.0)
    assert DecodeCurve(((1, 2.0), (4, 1.0))).step_ms(8) == 1.0  # measured noise does not make large batches free
    assert DecodeCurve(((3, 2.0),)).step_ms(1) == DecodeCurve(((3, 2.0),)).step_ms(9) == 2.0


@pytest.mark.parametrize("bad", [(), ((2, 1.0), (1, 1.0)), ((1, 0.0),), ((1, float("nan")),), ((0, 1.0),)])
def test_bad_points_are_refused(bad: tuple) -> None:
    with pytest.raises(ValueError, match="points"):
        DecodeCurve(bad)


class Measurement:
    def __init__(self, times: dict[int, float] = TIMES) -> None:
        self.times, self.runs = times, 0

    def __call__(self) -> dict[int, float]:
        self.runs += 1
        return self.times


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_curve_is_measured_once_for_a_key(folder: Path) -> None:
    measure = Measurement()
    first, second = load_or_measure(KEY, measure), load_or_measure(dict(reversed(KEY.items())), measure)
    assert measure.runs == 1 and first == second and first.points == tuple(TIMES.items())
    other = Measurement({1: 7.0})
    assert load_or_measure({**KEY, "card": "c"}, other).points == ((1, 7.0),) and other.runs == 1
    assert load_or_measure(KEY, measure).points == first.points and measure.runs == 1
    assert len(list(folder.iterdir())) == 2  # and nothing temporary


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"b"', '"another card"'),
        lambda text: json.dumps({"key": KEY, "points": []}),
        lambda text: json.dumps({"key": KEY, "points": [[1, -3.0]]}),
        lambda text: json.dumps({"key": KEY, "points": [[1, 1.0], [10**400, 2.0]]}),  # beyond any float
        lambda text: json.dumps({"key": KEY, "points": [[1, 1.0], [2, 1e308]]}),  # steps of three would take for ever
        lambda text: json.dumps({"key": KEY, "points": [[1, None]]}),
        lambda text: json.dumps({"key": KEY, "points": 5}),
        lambda text: "\udcff" * 3,
    ],
)
def test_a_damaged_or_foreign_file_is_measured_again_and_replaced(folder: Path, damage: object) -> None:
    load_or_measure(KEY, Measurement())
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_text()).encode("utf-8", "surrogateescape"))  # type: ignore[operator]
    measure = Measurement({1: 3.0, 4: 6.0})
    assert load_or_measure(KEY, measure).points == ((1, 3.0), (4, 6.0)) and measure.runs == 1
    assert load_or_measure(KEY, measure).points == ((1, 3.0), (4, 6.0)) and measure.runs == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.sampled_from(["key", "points", "1", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["key", "points"]), inner, max_size=2),
    max_leaves=8,
)
points_like = st.lists(st.tuples(json_values, json_values) | json_values, max_size=4)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_whatever_the_file_holds_the_curve_is_a_curve(folder: Path, data: st.DataObject) -> None:
    """Any bytes, any JSON, the right key with any points, or one byte of a good file changed."""
    measure = Measurement()
    load_or_measure(KEY, measure)
    (path,) = folder.iterdir()
    good = path.read_bytes()
    kind = data.draw(st.sampled_from(["bytes", "json", "points", "flip", "deep"]))
    if kind == "flip":
        at = data.draw(st.integers(0, len(good) - 1))
        bad = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
    elif kind == "bytes":
        bad = data.draw(st.binary(max_size=60))
    elif kind == "deep":
        bad = b"[" * data.draw(st.sampled_from([10, 100_000]))
    else:
        value = data.draw(json_values) if kind == "json" else {"key": KEY, "points": data.draw(points_like)}
        bad = json.dumps(value).encode()
    path.write_bytes(bad)
    curve = load_or_measure(KEY, measure)
    assert 0 < curve.step_ms(1) < math.inf and 0 < curve.step_ms(1000)
    if kind in ("bytes", "json", "deep"):
        assert curve.points == tuple(TIMES.items())
    path.unlink()


def test_processes_that_start_together_read_whole_curves_or_none(folder: Path) -> None:
    """Each writes what it has measured; whoever reads meanwhile sees one of these curves, whole."""
    curves = [tuple((size, float(number + size)) for size in range(1, 400)) for number in range(8)]
    got: list[DecodeCurve] = []

    def start(number: int) -> None:
        for attempt in range(12):
            if attempt % 4 == number % 4:
                for path in folder.glob("decode-curve-*.json"):
                    path.unlink(missing_ok=True)
            got.append(load_or_measure(KEY, lambda: dict(curves[number])))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(len(curves))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8 * 12 and all(curve.points in curves for curve in got)
    assert len(list(folder.iterdir())) <= 1  # and nothing temporary


def test_a_folder_that_cannot_be_written_costs_only_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert load_or_measure(KEY, Measurement()).points == tuple(TIMES.items())
    assert "not kept" in caplog.text


def test_a_runner_measures_its_decode_steps_on_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FORCE_REFERENCE", True)  # else the kernels are compiled into this new folder
    config = EngineConfig(block_size=16, num_blocks=40, max_num_seqs=6, max_model_len=100, dtype="fp64")
    runner = ModelRunner(model(), config)
    assert not list(folder.glob("decode-curve-*"))  # not at start-up of a CPU
    curve = runner.decode_curve()
    assert [size for size, _ in curve.points] == [1, 2, 4, 6]
    (path,) = folder.glob("decode-curve-*")
    assert ModelRunner(model(), config).decode_curve() == curve  # floats survive JSON exactly: it was read
    key = json.loads(path.read_text())["key"]
    assert key["max_num_seqs"] == 6 and key["device"] and key["torch"]
