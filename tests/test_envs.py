"""The table of environment variables is complete, and bad values are refused by name."""

import re
from pathlib import Path

import pytest

import deepinfer
from deepinfer import envs

PACKAGE = Path(deepinfer.__file__).parent


def test_the_table_lists_exactly_the_variables_in_use() -> None:
    used = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name != "envs.py":
            used |= set(re.findall(r"\bDEEPINFER_[A-Z0-9_]+\b", path.read_text(encoding="utf-8")))
    assert used == set(envs.VARIABLES)


def test_nothing_else_reads_them_from_the_environment() -> None:
    """Assignments, by which the command line passes its options on, are allowed."""
    read = re.compile(r"""(getenv\(|environ\.get\()\s*["']DEEPINFER_|environ\[["']DEEPINFER_\w+["']\](?! = )""")
    for path in PACKAGE.rglob("*.py"):
        assert not read.search(path.read_text(encoding="utf-8")), path


def test_values_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPINFER_CHECK_INTEGRITY", raising=False)
    assert envs.get("DEEPINFER_CHECK_INTEGRITY") is False
    monkeypatch.setenv("DEEPINFER_CHECK_INTEGRITY", "1")
    assert envs.get("DEEPINFER_CHECK_INTEGRITY") is True
    monkeypatch.setenv("DEEPINFER_CHECK_INTEGRITY", "maybe")
    with pytest.raises(ValueError, match="DEEPINFER_CHECK_INTEGRITY='maybe'.*true"):
        envs.get("DEEPINFER_CHECK_INTEGRITY")
    monkeypatch.setenv("DEEPINFER_KERNELS", "fast")
    with pytest.raises(ValueError, match="DEEPINFER_KERNELS='fast': must be one of auto, reference"):
        envs.get("DEEPINFER_KERNELS")


@pytest.mark.parametrize("text", ["rubbish", "", "-1", "nan", "9" * 5000, "1e999"], ids=lambda text: text[:10])
@pytest.mark.parametrize("name", sorted(envs.VARIABLES))
def test_rubbish_is_refused_with_what_is_allowed(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or taken, where the value is a text, a path or a number without a limit; never another exception."""
    monkeypatch.setenv(name, text)
    try:
        value = envs.get(name)
    except ValueError as error:
        assert str(error).startswith(f"environment variable {name}=")
        assert ": must " in str(error) and len(str(error)) < 400
    else:
        assert isinstance(value, str | Path | int)


@pytest.mark.parametrize("text", ["1e-9", "1.9"])
def test_an_engine_is_given_the_time_for_a_sign_of_life(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ENGINE_TIMEOUT", text)
    with pytest.raises(ValueError, match="DEEPINFER_ENGINE_TIMEOUT=.*must be 0 or a number >= 2"):
        envs.get("DEEPINFER_ENGINE_TIMEOUT")
    monkeypatch.setenv("DEEPINFER_ENGINE_TIMEOUT", "0")
    assert envs.get("DEEPINFER_ENGINE_TIMEOUT") == 0
