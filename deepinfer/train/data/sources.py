"""Text sources: sampled stories and answers, Python documentation and code, PostgreSQL documentation, Shakespeare."""

import html
import json
import lzma
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

RST_MARKUP = re.compile(r"\s*(\.\. (index|_|sectionauthor|module|moduleauthor|versionadded|highlight|XXX)|:[a-z]+:)")
CHUNK = 3000  # characters of one document cut from a long file


@dataclass(frozen=True)
class Sample:
    """One answer of the sampler. `complete` is False where the answer was cut and trimmed to its last sentence."""

    prompt: str
    answer: str
    complete: bool


def words_in(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def load_samples(folder: Path) -> list[Sample]:
    """Read the sampler's shards and keep the good ones: known words, few repeats, no talk about the sampling model."""
    records = []
    for path in sorted(folder.glob("smollm-*.jsonl.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as f:
            records += [json.loads(line) for line in f]
    frequency: Counter[str] = Counter()
    for record in records:
        frequency.update(set(words_in(record["answer"])))
    kept, seen = [], set()
    for record in records:
        text = trim(record["answer"].strip(), record["end"])
        if text[:200] not in seen and is_good(text, frequency):
            seen.add(text[:200])
            kept.append(Sample(record["prompt"], text, record["end"]))
    return kept


def trim(text: str, complete: bool) -> str:
    """A cut answer ends at its last full sentence."""
    if complete:
        return text
    ends = [m.end() for m in re.finditer(r'[.!?]"?(?=\s)', text)]
    return text[: ends[-1]] if ends else ""


def is_good(text: str, frequency: Counter[str]) -> bool:
    words = words_in(text)
    if len(words) < 6 or "�" in text or re.search(r"SmolLM|Hugging ?Face|language model|https?:", text):
        return False
    if sum(frequency[word] < 12 for word in words) > 0.04 * len(words):
        return False
    if len(words) > 60 and len(set(zip(words, words[1:], words[2:], strict=False))) < 0.8 * len(words):
        return False
    return sum(ord(c) > 0x2100 for c in text) < 0.01 * len(text)


def chunks(text: str, separator: str) -> Iterator[str]:
    """Cut at separators into pieces of at most about CHUNK characters; pieces under 200 characters are dropped."""
    piece = ""
    for part in text.split(separator):
        if piece and len(piece) + len(part) > CHUNK:
            if len(piece) >= 200:
                yield piece.strip("\n")
            piece = ""
        piece += part + separator
    if len(piece) >= 200:
        yield piece.strip("\n")


def is_plain(text: str) -> bool:
    """Mostly ASCII, and no lines of data."""
    return sum(ord(c) > 126 for c in text) < 0.01 * len(text) and max(map(len, text.split("\n"))) <= 200


def python_docs(folder: Path) -> Iterator[str]:
    """reStructuredText sources of the Python manual (package python3.11-doc), with roles reduced to their text."""
    for path in sorted(folder.rglob("_sources/**/*.rst.txt")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        text = re.sub(r":[a-z:+]+:`~?!?([^`<]+)(?: <[^`]*>)?`", r"\1", text).replace("``", "`")
        lines = [x for x in text.split("\n") if not RST_MARKUP.match(x)]
        for piece in chunks(re.sub(r"\n{3,}", "\n\n", "\n".join(lines)), "\n\n"):
            if is_plain(piece):
                yield piece


def postgresql_docs(folder: Path) -> Iterator[str]:
    """Paragraphs of the PostgreSQL manual (package postgresql-doc-15)."""
    for path in sorted(folder.rglob("*.html")):
        if path.name.startswith("release"):
            continue
        page = path.read_text(encoding="utf-8", errors="ignore")
        paragraphs = [html.unescape(re.sub(r"<[^>]+>", "", p)) for p in re.findall(r"<p>(.*?)</p>", page, re.S)]
        text = "\n\n".join(" ".join(p.split()) for p in paragraphs if len(p) > 60)
        for piece in chunks(text, "\n\n"):
            if sum(ord(c) > 126 for c in piece) < 0.01 * len(piece):
                yield piece


def python_code(folders: Iterable[Path]) -> Iterator[str]:
    """Python modules without tests, data tables and licence headers, cut at top-level definitions."""
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).parts
            skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data", "encodings", "_vendor"}
            if skipped & set(parts) or "unicode" in path.name or not 500 < path.stat().st_size < 200000:
                continue
            text = path.read_text(encoding="utf-8", errors="ignore")
            header = re.match(r"(#[^\n]*\n)+", text)
            if header and re.search("copyright|licen[sc]e", header.group(), re.I):
                text = text[header.end() :]
            for piece in chunks(text, "\n\n\n"):
                if is_plain(piece) and len(piece) <= 2 * CHUNK:
                    yield piece


def shakespeare(folder: Path) -> Iterator[str]:
    """Plays in modern spelling (package shakespeare)."""
    for path in sorted(folder.rglob("shksprdata/texts/*_gut.txt")):
        text = path.read_text(encoding="utf-8", errors="ignore").replace("\r", "")
        body = text[len(text) // 20 : -len(text) // 20]  # the licence text stands at both ends
        for piece in chunks(body, "\n\n"):
            if is_plain(piece) and "gutenberg" not in piece.lower() and "copyright" not in piece.lower():
                yield piece


PACKAGES = (
    "click", "fastapi", "httpx", "httpcore", "jinja2", "networkx", "packaging", "pydantic", "requests", "rich",
    "starlette", "mpmath", "anyio", "markdown_it",
)  # fmt: skip


def text_documents(folder: Path) -> Iterator[tuple[str, str]]:
    """(source, text) of everything but the samples. `folder` holds the unpacked Debian packages and `shakespeare`."""
    for piece in python_docs(folder / "python3.11-doc"):
        yield "python_docs", piece
    for piece in islice(postgresql_docs(folder / "postgresql-doc-15"), 1500):
        yield "postgresql_docs", piece
    packages = Path(sysconfig.get_path("purelib"))
    for piece in islice(python_code([Path(sysconfig.get_path("stdlib"))]), 4200):
        yield "python_code", piece
    for piece in islice(python_code([packages / p for p in PACKAGES if (packages / p).is_dir()]), 3000):
        yield "python_code", piece
    for piece in islice(shakespeare(folder), 500):
        yield "shakespeare", piece
