"""Finding delimiters in text that arrives in pieces, without letting the start of one slip out (recipe spec, 5)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


class Delimiters:
    """Strings to look for, read one character at a time in amortised constant time each (Knuth-Morris-Pratt).

    ``trimmed`` are those before which newlines vanish.
    """

    def __init__(self, strings: Sequence[str], trimmed: Sequence[str] = ()) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self.trimmed = frozenset(trimmed)
        self.failures = [_failure_table(string) for string in self.strings]
        firsts = "".join(sorted({string[0] for string in self.strings}))
        self.first = re.compile(f"[{re.escape(firsts)}]") if firsts else None


@lru_cache(maxsize=256)  # each choice of a request looks for the same strings
def _failure_table(pattern: str) -> tuple[int, ...]:
    """For each prefix of the pattern, the length of its longest proper suffix that is also a prefix."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return tuple(table)


class Search:
    """One pass of delimiters over a growing text."""

    def __init__(self, delimiters: Delimiters) -> None:
        self.delimiters = delimiters
        self.matched = [0] * len(delimiters.strings)  # characters of each string that the text so far ends with
        self.position = 0

    def advance(self, text: str) -> str | None:
        """Read on from ``position``; the delimiter that ends first, the longest if several end there, or None."""
        strings, failures, matched = self.delimiters.strings, self.delimiters.failures, self.matched
        while self.position < len(text):
            if not any(matched):
                start = self.delimiters.first.search(text, self.position) if self.delimiters.first else None
                self.position = start.start() if start else len(text)
                if start is None:
                    return None
            char = text[self.position]
            self.position += 1
            found = None
            for i, string in enumerate(strings):
                length = matched[i]
                while length and string[length] != char:
                    length = failures[i][length - 1]
                length += string[length] == char
                if length == len(string):
                    found = string if found is None or len(string) > len(found) else found
                    length = failures[i][length - 1]
                matched[i] = length
            if found is not None:
                return found
        return None

    def passes(self, text: str) -> bool:
        """Whether a text at the start holds nothing of a delimiter, and nothing that would be trimmed before one."""
        delimiters = self.delimiters
        if delimiters.first is None:
            return True
        return delimiters.first.search(text) is None and not (delimiters.trimmed and text.endswith("\n"))

    def held(self, text: str) -> int:
        """Where the part of ``text`` begins that may yet turn out to belong to a delimiter."""
        trimmed = [n for n, string in zip(self.matched, self.delimiters.strings, strict=True)
                   if string in self.delimiters.trimmed]  # fmt: skip
        start = len(text) - max(self.matched, default=0)
        if trimmed:
            start = min(start, len(text[: len(text) - max(trimmed)].rstrip("\n")))
        return start


@dataclass
class Piece:
    """Text of one push and what came with it (log probabilities of its tokens)."""

    text: str
    extra: tuple[Any, ...] = ()


class HoldBack:
    """Pending pieces.  A piece goes out whole, once no delimiter can begin in it or before its end."""

    def __init__(self, delimiters: Delimiters) -> None:
        self._pieces: list[Piece] = []
        self._text = ""
        self._search = Search(delimiters)

    def restart(self, delimiters: Delimiters) -> None:
        """Look for other delimiters in what is pending and what follows."""
        self._search = Search(delimiters)

    def passes(self, text: str) -> bool:
        """Whether this text may be let out at once: nothing is pending, and no delimiter begins in it."""
        return not self._text and self._search.passes(text)

    @property
    def text(self) -> str:
        return self._text

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._text += piece.text

    def next(self) -> tuple[list[Piece], str | None]:
        """(pieces to let out, delimiter found after them).  The delimiter is removed; search goes on after it."""
        found = self._search.advance(self._text)
        if found is None:
            return self._take(self._search.held(self._text), whole=True), None
        start = self._search.position - len(found)
        if found in self._search.delimiters.trimmed:
            start = len(self._text[:start].rstrip("\n"))
        end = self._search.position
        out = self._take(start, whole=False)
        self._take(end - start, whole=False)
        self.restart(self._search.delimiters)
        return out, found

    def drop_newlines(self) -> bool:
        """Drop newlines at the start of what is pending; True when something else remains."""
        count = len(self._text) - len(self._text.lstrip("\n"))
        if count:
            self._take(count, whole=False)
            self.restart(self._search.delimiters)
        return bool(self._text)

    def rest(self) -> list[Piece]:
        """Everything that is pending."""
        return self._take(len(self._text), whole=True)

    def _take(self, count: int, whole: bool) -> list[Piece]:
        """Remove the first ``count`` characters as pieces; with ``whole`` only pieces that end within them."""
        out: list[Piece] = []
        taken = 0
        while self._pieces and taken < count:
            piece = self._pieces[0]
            room = count - taken
            if len(piece.text) > room:
                if whole:
                    break
                out.append(Piece(piece.text[:room], piece.extra))
                self._pieces[0] = Piece(piece.text[room:])
                taken = count
                break
            out.append(self._pieces.pop(0))
            taken += len(piece.text)
        self._text = self._text[taken:]
        self._search.position -= taken
        return out


class StopStrings:
    """Stop strings alone: what may be shown, until one of them is complete."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """``include`` shows the stop string that matched.  Raises ValueError for an empty one."""
        if not all(stops):
            raise ValueError("stop strings must not be empty")
        self._include = include
        self._pending = HoldBack(Delimiters(stops))
        self.stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to show, stop string that ends the output).  After a match nothing more is shown."""
        if self.stopped is not None:
            return "", self.stopped
        if self._pending.passes(text):
            return text, None
        self._pending.add(Piece(text))
        out, self.stopped = self._pending.next()
        last = self.stopped if self.stopped is not None and self._include else ""
        return "".join(piece.text for piece in out) + last, self.stopped

    def finish(self) -> str:
        """Text held back because it began like a stop string."""
        return "" if self.stopped is not None else "".join(piece.text for piece in self._pending.rest())
