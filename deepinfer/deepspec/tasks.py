"""Prompts of public task sets, read from a folder: one .jsonl (or .jsonl.gz) file a set, in its published format.

| Set | Fields of a line |
| --- | --- |
| GSM8K | question, answer |
| MATH-500 | problem, solution |
| HumanEval | prompt (the head of a Python function), task_id |
| MBPP | text or prompt, code |
| MT-Bench | turns (or prompt, a list), of which the first is asked |
| Alpaca | instruction, input |
| any, encoded for one model | prompt_ids |
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """A question to ask, text to go on with, or token ids as they are."""

    text: str
    is_chat: bool
    token_ids: tuple[int, ...] = ()


def read_tasks(folder: Path, limit: int | None = None) -> dict[str, list[Prompt]]:
    """Prompts by task set (the file's name without ending), at most `limit` of each.

    Raises:
        ValueError: there is no set in the folder, or a line is in none of the formats; the message names it.
    """
    if not folder.is_dir():
        raise ValueError(f"tasks: {folder} is not a folder")
    paths = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")])
    if not paths:
        raise ValueError(f"tasks: no .jsonl file in {folder}")
    return {path.name.split(".jsonl")[0]: read_prompts(path, limit) for path in paths}


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of one file."""
    prompts: list[Prompt] = []
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
    with opened as file:
        for number, line in enumerate(file, 1):
            if limit is not None and len(prompts) == limit:
                break
            if not line.strip():
                continue
            try:
                prompts.append(as_prompt(json.loads(line)))
            except ValueError as error:
                raise ValueError(f"tasks: {path}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"tasks: {path} holds no prompt")
    return prompts


def as_prompt(line: Any) -> Prompt:
    """The prompt of one line of any of the formats."""
    if not isinstance(line, dict):
        raise ValueError("not a JSON object")
    if "prompt_ids" in line:
        ids = line["prompt_ids"]
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError("prompt_ids must be a list of token ids")
        return Prompt("", is_chat=False, token_ids=tuple(ids))
    if "task_id" in line and "entry_point" in line:  # HumanEval: code that goes on
        return Prompt(_text(line, "prompt"), is_chat=False)
    turns = line.get("turns", line.get("prompt") if isinstance(line.get("prompt"), list) else None)
    if turns is not None:
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise ValueError("turns must be a list of texts")
        return Prompt(turns[0], is_chat=True)
    if "instruction" in line:
        given = line.get("input") or ""
        return Prompt(_text(line, "instruction") + (f"\n\n{given}" if given else ""), is_chat=True)
    for name in ("question", "problem", "text", "prompt"):
        if name in line:
            return Prompt(_text(line, name), is_chat=True)
    raise ValueError("no question, problem, text, prompt, instruction or turns in it")


def _text(line: dict[str, Any], name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a text")
    return value
