"""Tool block of the output -> calls with JSON arguments, as the text comes in (recipe spec, 5).

Forgiving where the model slips: attributes in any order, a missing ``string`` attribute (a string then), a missing
closing tag, text between tags.
"""

from collections.abc import Callable
from enum import Enum, auto
from json.encoder import encode_basestring

from deepinfer.recipe.events import Event, ToolCallArguments, ToolCallStart
from deepinfer.recipe.json_value import CLOSING_MARK, JsonValue
from deepinfer.recipe.matching import Delimiters, HoldBack, Piece

OPENING_MARK = "<｜DSML｜"
_VALUE_END = Delimiters((CLOSING_MARK,))


class _At(Enum):
    BLOCK = auto()  # between calls
    TAG = auto()  # of a call, after "invoke"
    CALL_NAME = auto()
    CALL = auto()  # inside a call, between parameters
    PARAMETER = auto()  # after "parameter"
    QUOTE = auto()  # before the quote that opens a parameter's name
    KEY = auto()
    AFTER_KEY = auto()
    ATTRIBUTES = auto()  # between a parameter's name and ">"
    STRING = auto()
    JSON = auto()
    DONE = auto()


class DsmlParser:
    """Reads the text after the first opening mark."""

    def __init__(self, new_id: Callable[[int], str]) -> None:
        self.calls = 0
        self._new_id = new_id
        self._at = _At.BLOCK
        self._read = ""  # of the current tag, name or half-read mark
        self._parameters = 0
        self._value = HoldBack(_VALUE_END)  # a string
        self._json = JsonValue()
        self._events: list[Event] = []

    def push(self, text: str) -> list[Event]:
        """Events of the next text: names whole, argument text piece by piece."""
        key = ""  # of a parameter's name, what this push adds
        position = 0
        while position < len(text):
            if self._at in (_At.STRING, _At.JSON):
                read = self._read_string if self._at is _At.STRING else self._read_json
                text, position = read(text[position:]), 0
                continue
            char = text[position]
            position += 1
            if self._at in (_At.QUOTE, _At.KEY):
                key += self._read_key(char)
                if self._at is _At.AFTER_KEY:
                    self._argument(key)
                    key = ""
            else:
                self._step(char)
        if key:
            self._argument(key)
        return self._take_events()

    def finish(self) -> list[Event]:
        """End of the output: a call that was cut off stays cut off, with every character that was written."""
        for piece in self._value.rest():
            self._argument(_escape_string(piece.text))
        rest = self._json.rest()
        if rest:
            self._argument(rest)
        return self._take_events()

    def _step(self, char: str) -> None:
        match self._at:
            case _At.BLOCK:
                self._between_calls(char)
            case _At.CALL:
                self._between_parameters(char)
            case _At.TAG:
                self._read += char
                if char == ">":
                    self._go(_At.BLOCK)
                elif self._read.endswith('name="'):
                    self._go(_At.CALL_NAME)
            case _At.CALL_NAME:
                if char == '"':
                    self._start_call(self._read)
                else:
                    self._read += char
            case _At.PARAMETER:
                self._parameter_tag(char)
            case _At.AFTER_KEY:
                self._argument(": ")
                self._at = _At.ATTRIBUTES
                self._attributes(char)
            case _At.ATTRIBUTES:
                self._attributes(char)

    def _between_calls(self, char: str) -> None:
        """Skip text up to a call, or to the end of the block once there were calls."""
        self._read = self._read[-len(CLOSING_MARK) :] + char
        if self._read.endswith("invoke"):
            self._go(_At.TAG)
        elif self.calls and self._read.endswith(CLOSING_MARK):
            self._go(_At.DONE)

    def _between_parameters(self, char: str) -> None:
        """Skip text up to a parameter, the end of the call, or a further call when the end is missing."""
        self._read = self._read[-len(CLOSING_MARK) :] + char
        if self._read.endswith("parameter"):
            self._go(_At.PARAMETER)
        elif self._read.endswith(CLOSING_MARK):
            self._close_call()
        elif self._read.endswith("invoke"):
            self._close_call()
            self._go(_At.TAG)

    def _parameter_tag(self, char: str) -> None:
        self._read += char
        if self._read.endswith("name="):
            self._argument(", " if self._parameters else "{")
            self._parameters += 1
            self._at = _At.QUOTE  # what was read of the tag may hold the string attribute
        elif char == ">":
            self._go(_At.CALL)

    def _read_key(self, char: str) -> str:
        if self._at is _At.QUOTE:
            self._at = _At.KEY if char == '"' else _At.QUOTE
            return '"' if char == '"' else ""
        if char == '"':
            self._at = _At.AFTER_KEY
            return '"'
        return _escape_string(char)

    def _attributes(self, char: str) -> None:
        if char != ">":
            self._read += char
            return
        is_json = 'string="false"' in self._read
        self._go(_At.JSON if is_json else _At.STRING)
        if not is_json:
            self._argument('"')

    def _read_string(self, text: str) -> str:
        """Let the string through up to its closing mark; returns the text after it."""
        self._value.add(Piece(text))
        pieces, end = self._value.next()
        for piece in pieces:
            self._argument(_escape_string(piece.text))
        if end is None:
            return ""
        self._argument('"')
        self._go(_At.CALL)
        return "".join(piece.text for piece in self._value.rest())

    def _read_json(self, text: str) -> str:
        value, behind = self._json.push(text)
        if value:
            self._argument(value)
        if behind is None:
            return ""
        self._json = JsonValue()
        self._go(_At.CALL)
        return behind

    def _start_call(self, name: str) -> None:
        self._events.append(ToolCallStart(self.calls, self._new_id(self.calls), name))
        self.calls += 1
        self._parameters = 0
        self._go(_At.CALL)

    def _close_call(self) -> None:
        self._argument("}" if self._parameters else "{}")
        self._go(_At.BLOCK)

    def _go(self, at: _At) -> None:
        self._at, self._read = at, ""

    def _argument(self, text: str) -> None:
        self._events.append(ToolCallArguments(self.calls - 1, text))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _escape_string(text: str) -> str:
    return encode_basestring(text)[1:-1]
