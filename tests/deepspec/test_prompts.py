"""Prompts cut from packed rows."""

from __future__ import annotations

import numpy as np

from deepinfer.deepspec import prompts
from deepinfer.deepspec.tasks import read_tasks

TEXT, CHAT = list(range(1000, 1200)), list(range(2000, 2040))


def write_rows(folder):
    """A text of 200 tokens, a chat whose last 10 are the answer, a text too short, one that the row cuts off."""
    tokens = [0, *TEXT, 0, *CHAT, 0, *range(3000, 3050), 0, *range(4000, 4300)]
    written = [0] + [1] * 200 + [0] + [0] * 30 + [1] * 10 + [0] + [1] * 50 + [0] + [1] * 300
    np.save(folder / "train-0.npy", np.array([tokens], np.uint16))
    np.save(folder / "targets-0.npy", np.packbits(np.array([written], np.uint8), axis=1))


def test_chats_end_where_the_target_writes(tmp_path):
    write_rows(tmp_path)
    cuts = set()
    for seed in range(20):
        prompts.main(["--data", str(tmp_path), "--out", str(tmp_path / "tasks"), "--seed", str(seed)])
        sets = read_tasks(tmp_path / "tasks")
        assert [list(prompt.token_ids) for prompt in sets["chat"]] == [[0, *CHAT[:30]]]
        assert sorted(prompt.token_ids[1] // 1000 for prompt in sets["text"]) == [1, 4]
        for prompt in sets["text"]:
            first = prompt.token_ids[1]
            assert list(prompt.token_ids) == [0, *range(first, first + prompts.TEXT_TOKENS)]
            cuts.add(first % 1000)
    assert 0 in cuts and len(cuts) > 5  # beginnings, and places inside
    prompts.main(["--data", str(tmp_path), "--out", str(tmp_path / "few"), "--count", "1"])
    assert {name: len(part) for name, part in read_tasks(tmp_path / "few").items()} == {"chat": 1, "text": 1}
