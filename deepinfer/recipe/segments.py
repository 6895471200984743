"""Encoding long texts in parallel pieces, and recent ones from memory (recipe spec, 3)."""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

PIECE_CHARS = 16384
_CACHE_CHARS = 4_000_000

# DeepSeek's last split: no word of it goes on from a line break to a letter, or from a letter to a blank before a
# letter, and what lies on one side does not change how the other side is split.
_SPLIT = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
_SAFE_CUT = re.compile(r"\n(?=[A-Za-z])|[A-Za-z](?= [A-Za-z])")


def can_be_cut(definition: Mapping[str, Any]) -> bool:
    """Whether ``cut`` is safe for this tokenizer.json: it must split words as DeepSeek's does, without normaliser."""
    normalizer = definition.get("normalizer") or {}
    if normalizer.get("normalizers", normalizer):
        return False
    splits = (definition.get("pre_tokenizer") or {}).get("pretokenizers", [])
    if [part.get("type") for part in splits] != ["Split", "Split", "Split", "ByteLevel"]:
        return False
    pattern = (splits[2].get("pattern") or {}).get("Regex", "").replace("\\r", "\r").replace("\\n", "\n")
    return pattern == _SPLIT and not splits[3].get("use_regex", True)


def cut(text: str, size: int = PIECE_CHARS) -> list[str]:
    """Pieces whose token IDs, in order, are those of the whole text; all but the last of ``size`` or more."""
    pieces = []
    start = 0
    while len(text) - start >= 2 * size:
        match = _SAFE_CUT.search(text, start + size)
        if match is None:
            break
        pieces.append(text[start : match.end()])
        start = match.end()
    pieces.append(text[start:])
    return pieces


class SegmentCache:
    """Token IDs of recently encoded segments, so that a longer conversation re-encodes only its new tail.

    The least recently used ones go when the texts exceed ``limit`` characters in all.
    """

    def __init__(self, limit: int = _CACHE_CHARS) -> None:
        self._limit = limit
        self._used = 0
        self._entries: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = Lock()

    def encode(self, texts: Sequence[str], encode: Callable[[list[str]], list[list[int]]]) -> list[list[int]]:
        """IDs of each text, calling ``encode`` with those that are not remembered."""
        with self._lock:
            known = {text: ids for text in set(texts) if (ids := self._entries.get(text)) is not None}
            for text in known:
                self._entries.move_to_end(text)
        missing = [text for text in dict.fromkeys(texts) if text not in known]
        if missing:
            known.update(zip(missing, encode(missing), strict=True))
            self._remember(missing, known)
        return [known[text] for text in texts]

    def _remember(self, texts: list[str], known: Mapping[str, list[int]]) -> None:
        with self._lock:
            for text in texts:
                if text not in self._entries and len(text) <= self._limit:
                    self._entries[text] = known[text]
                    self._used += len(text)
            while self._used > self._limit:
                text, _ = self._entries.popitem(last=False)
                self._used -= len(text)
