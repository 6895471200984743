"""Run vector files of the public recipe library's behaviour against this package (recipe spec, 7)."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer.recipe.check_parse import check_parse
from deepinfer.recipe.check_render import Vector, check_render
from deepinfer.recipe.known_differences import PARSE_DIFFERENCES, RENDER_DIFFERENCES
from deepinfer.recipe.tokenizer import Tokenizer


@dataclass
class Report:
    """What running vectors gave.

    ``failed``: the first difference by vector name.  ``differing``: vectors that passed but for a known difference,
    with the reason.
    """

    passed: int = 0
    differing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def load_vectors(path: str | Path) -> tuple[str, list[Vector]]:
    """(kind, vectors) of a vector file.  Raises ValueError when the file is not one."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        kind, vectors = data["meta"]["kind"], data["vectors"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a vector file: {error}") from error
    if kind not in ("render", "parse"):
        raise ValueError(f"{path}: kind must be render or parse, got {kind!r}")
    return kind, vectors


def check_files(paths: Iterable[str | Path], tokenizer: Tokenizer | None = None) -> Report:
    """Run every vector of the files.

    Without a tokenizer, token IDs are not compared and vectors that need one are skipped.  Raises ValueError for a file
    that is not a vector file.
    """
    report = Report()
    for path in paths:
        kind, vectors = load_vectors(path)
        for vector in vectors:
            _run(kind, vector, tokenizer, report)
    return report


def _run(kind: str, vector: Vector, tokenizer: Tokenizer | None, report: Report) -> None:
    name = vector["name"]
    if kind == "parse" and tokenizer is None and any(chunk["kind"] == "tokens" for chunk in vector["chunks"]):
        report.skipped.append(name)
        return
    difference = (check_render if kind == "render" else check_parse)(vector, tokenizer)
    if difference:
        report.failed[name] = difference
        return
    report.passed += 1
    known = (RENDER_DIFFERENCES if kind == "render" else PARSE_DIFFERENCES).get(name)
    if known:
        report.differing[name] = known.reason
