"""Prompts of public task sets, read from a folder: one file a set, in its published format.

A file is .jsonl, or .json with one array of the same objects (Alpaca, sanitized MBPP); either may end in .gz.

| Set | Fields of an object |
| --- | --- |
| GSM8K | question, answer |
| MATH-500 | problem, solution |
| HumanEval | prompt (the head of a Python function), task_id |
| MBPP | text or prompt, code |
| MT-Bench | turns (or prompt, a list), asked one after the other |
| Alpaca | instruction, input |
| any, encoded for one model | prompt_ids |
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

ENCODING = "utf-8-sig"  # a byte order mark at the start says nothing
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz")


@dataclass(frozen=True)
class Prompt:
    """A question to ask, text to go on with, or token ids as they are. `later`: what is asked after the answer."""

    text: str
    is_chat: bool
    token_ids: tuple[int, ...] = ()
    later: tuple[str, ...] = ()


def read_tasks(folder: Path, limit: int | None = None) -> dict[str, list[Prompt]]:
    """Prompts by task set (the file's name without ending), at most `limit` of each.

    Raises:
        ValueError: there is no set in the folder, two have one name, or an object is in none of the formats; the
            message names it.
    """
    if not folder.is_dir():
        raise ValueError(f"tasks: {folder} is not a folder")
    paths = sorted(path for ending in ENDINGS for path in folder.glob("*" + ending))
    if not paths:
        raise ValueError(f"tasks: no .jsonl or .json file in {folder}")
    names = [path.name.split(".json")[0] for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"tasks: {folder} has more than one file of {name}")
    return {name: read_prompts(path, limit) for name, path in zip(names, paths, strict=True)}


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of one file."""
    prompts: list[Prompt] = []
    for number, record in islice(_records(path), limit):
        try:
            prompts.append(as_prompt(record))
        except ValueError as error:
            raise ValueError(f"tasks: {path}, {number}: {error}") from None
    if not prompts:
        raise ValueError(f"tasks: {path} holds no prompt")
    return prompts


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """(where it stands, object) of a file, one after the other."""
    where = "start"
    try:
        with gzip.open(path, "rt", encoding=ENCODING) if path.suffix == ".gz" else path.open(encoding=ENCODING) as file:
            if ".jsonl" not in path.name:
                whole = json.load(file)
                if not isinstance(whole, list):
                    raise ValueError("not a JSON array")
                yield from ((f"entry {i}", record) for i, record in enumerate(whole, 1))
                return
            for line_number, line in enumerate(file, 1):
                where = f"line {line_number}"
                if line.strip():
                    yield where, json.loads(line)
    except (ValueError, OSError, EOFError, zlib.error, RecursionError) as error:
        raise ValueError(f"tasks: {path}, {where}: {error}") from None


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
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError("turns must be a list of texts")
        first, *later = map(_encodable, turns)
        return Prompt(first, is_chat=True, later=tuple(later))
    if "instruction" in line:
        given = _text(line, "input") if line.get("input") else ""
        return Prompt(_text(line, "instruction") + (f"\n\n{given}" if given else ""), is_chat=True)
    for name in ("question", "problem", "text", "prompt"):
        if name in line:
            return Prompt(_text(line, name), is_chat=True)
    raise ValueError("no question, problem, text, prompt, instruction or turns in it")


def _text(line: dict[str, Any], name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a text")
    return _encodable(value)


def _encodable(text: str) -> str:
    """`text`, unless it has halves of surrogate pairs, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start}") from None
    return text
