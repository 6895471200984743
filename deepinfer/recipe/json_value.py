"""The JSON value of a tool call's parameter, up to the mark that closes it (recipe spec, 5).

Inside a JSON string the mark is text. If a value leaves a string open, a whole closing tag with its newline, which no
JSON string holds, ends it all the same.
"""

import re

from deepinfer.recipe.matching import Delimiters, HoldBack, Piece

CLOSING_MARK = "</｜DSML｜"
_BETWEEN_STRINGS = Delimiters((CLOSING_MARK,))
_IN_STRING = Delimiters([f"{CLOSING_MARK}{space}{tag}>\n" for space in ("", " ") for tag in ("parameter", "invoke")])
_STRING_TEXT = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)


class JsonValue:
    """Reads the text of one value."""

    def __init__(self) -> None:
        self._in_string = False
        self._escapes = False  # the next character is behind a backslash
        self._pending = HoldBack(_BETWEEN_STRINGS)

    def push(self, text: str) -> tuple[str, str | None]:
        """(text of the value, what follows its closing mark or None while it goes on)."""
        out: list[str] = []
        position = 0
        while position < len(text):
            end, closes = self._part(text, position)
            self._pending.add(Piece(text[position:end]))
            pieces, found = self._pending.next()
            out += [piece.text for piece in pieces]
            if found is not None:
                return "".join(out), found.removeprefix(CLOSING_MARK) + self.rest() + text[end:]
            if closes:  # nothing is pending behind a quote, which is in no delimiter
                self._in_string = not self._in_string
                self._pending.restart(_IN_STRING if self._in_string else _BETWEEN_STRINGS)
            position = end
        return "".join(out), None

    def rest(self) -> str:
        """What is held back because it may belong to a mark."""
        return "".join(piece.text for piece in self._pending.rest())

    def _part(self, text: str, start: int) -> tuple[int, bool]:
        """Where the text up to the next quote ends (behind it), and whether that quote is there."""
        if not self._in_string:
            quote = text.find('"', start)
            return (len(text), False) if quote < 0 else (quote + 1, True)
        match = _STRING_TEXT.match(text, start + self._escapes)
        end = len(text) if match is None else match.end()
        self._escapes = text[end : end + 1] == "\\"
        closes = text[end : end + 1] == '"'
        return (end + 1, True) if closes else (len(text), False)
