"""Files that are replaced as a whole: what was there stays until the new one is complete."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from deepinfer.files import replacing


def test_a_file_takes_its_place_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444  # as the umask says: readable by others, too


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError), replacing(tmp_path / "no folder" / "a") as part:
        part.write_text("x")


def test_many_writers_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a"

    def write(letter: str) -> None:
        for _ in range(50):
            with replacing(path) as part:
                part.write_text(letter * 1000)

    writers = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        text = path.read_text() if path.exists() else "a" * 1000
        assert len(text) == 1000 and len(set(text)) == 1
    assert list(tmp_path.iterdir()) == [path]
