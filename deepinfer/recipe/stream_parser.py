"""Output text -> reasoning, answer and tool calls, piece by piece (recipe spec, 5)."""

from collections.abc import Callable, Sequence
from typing import Any

from deepinfer.recipe.dsml_parser import OPENING_MARK, DsmlParser
from deepinfer.recipe.events import AnswerText, Event, ReasoningText, new_call_id
from deepinfer.recipe.matching import Delimiters, HoldBack, Piece
from deepinfer.recipe.request import ParsingOptions

THINK_END = "</think>"
_FENCES = ("```json\n", "```\n")
_BRACES = ("{", "[")
_FENCE_END = "\n```"


class StreamParser:
    """Reads the output of one sequence.

    States: ``reasoning``, ``answer``, the JSON ones (``before_json``, ``json``, ``after_json``), ``tools``, ``done``.
    Text that may begin a delimiter is held back, by whole pushes, so that what comes out does not depend on how the
    text was cut.
    """

    def __init__(self, options: ParsingOptions | None = None, new_id: Callable[[int, bool], str] = new_call_id) -> None:
        """``new_id(index, reasoning was empty)`` names a call."""
        self.options = options or ParsingOptions()
        self.stop_string: str | None = None
        self._reasoning: list[str] = []  # a string would be copied with every piece
        self._in_format = False  # an answer that has a format has begun: no tool call will follow
        self._new_id = new_id
        self._state = self._first_state()
        self._pending = HoldBack(self._delimiters())
        stage = self.options.thinking_initial_stage
        self._drop_newlines = stage in (None, "ReasoningStart")
        self._spaced = False
        self._tools: DsmlParser | None = self._dsml() if self._state == "tools" else None

    @property
    def reasoning(self) -> str:
        """All of it so far."""
        return "".join(self._reasoning)

    @property
    def stopped(self) -> bool:
        """A stop string matched: nothing more will come out."""
        return self.stop_string is not None

    @property
    def called_tools(self) -> bool:
        return self._tools is not None and self._tools.calls > 0

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    def take_plain(self, text: str) -> bool:
        """Take the text if ``push`` would give it as it is, as one event of reasoning or of the answer."""
        reasoning = self._state == "reasoning"
        if self._tools is not None or self._drop_newlines or not (reasoning or self._state == "answer"):
            return False
        if self._awaits_format() or not self._pending.passes(text):
            return False
        if reasoning:
            self._reasoning.append(text)
        return True

    def push(self, text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        """Events that are certain after this text; ``logprobs`` (of its tokens) travel with its first event."""
        if self._state == "done" or not text:
            return []
        if self._tools is not None:
            return self._tools.push(text)
        piece = Piece(text, tuple(logprobs))
        if not (self._drop_newlines or self._awaits_format()) and self._pending.passes(text):
            return self._emit([piece])
        self._pending.add(piece)
        return self._read()

    def finish(self, engine_reason: str = "stop") -> list[Event]:
        """End of the output: what was held back comes out.

        With ``answer_open_reasoning``, a model that ended by itself ("stop") while reasoning has said all it will say;
        one that was cut off ("length") was still thinking.
        """
        if self._state == "done":
            return []
        if self._tools is not None:
            events = self._tools.finish()
        else:
            events = self._emit(self._pending.rest())
            unanswered = self._state == "reasoning" and engine_reason == "stop" and self.reasoning.strip()
            if unanswered and self.options.answer_open_reasoning:
                events.append(AnswerText(self.reasoning))
        self._state = "done"
        return events

    def finish_reason(self, engine_reason: str) -> str:
        """Why the output ended, from why the engine ended it ("stop", "length", "content_filter")."""
        if self.stopped:
            return "stop"
        return "tool_calls" if engine_reason == "stop" and self.called_tools else engine_reason

    def _first_state(self) -> str:
        if self.options.starts_in_tool_calls:
            return "tools"
        if self.options.begins_with_reasoning:
            return "reasoning"
        return self._answer_state()

    def _answer_state(self) -> str:
        return "before_json" if self.options.parse_json_output else "answer"

    def _delimiters(self) -> Delimiters:
        mark = (OPENING_MARK,) if self.options.parse_tool_calls else ()
        match self._state:
            case "reasoning":
                return Delimiters((THINK_END, *mark), trimmed=(THINK_END, *mark))
            case "answer" if self._in_format:
                return Delimiters(self.options.stop_sequences)
            case "answer":
                return Delimiters((THINK_END, *mark, *self.options.stop_sequences), trimmed=mark)
            case "before_json":
                return Delimiters((THINK_END, *mark, *_FENCES, *_BRACES), trimmed=mark)
            case "json":
                return Delimiters((_FENCE_END, *self.options.stop_sequences))
            case _:
                return Delimiters(())

    def _read(self) -> list[Event]:
        events: list[Event] = []
        while self._tools is None and self._state != "done":
            if self._drop_newlines:
                if not self._pending.drop_newlines():
                    break
                self._drop_newlines = False
            if self._begins_format():
                self._in_format = True
                self._pending.restart(self._delimiters())
            pieces, found = self._pending.next()
            events += self._emit(pieces)
            if found is None:
                break
            events += self._switch(found)
        return events

    def _awaits_format(self) -> bool:
        """Whether an answer of a format may begin here, or a tool block."""
        return self.options.answer_has_format and self._state == "answer" and not self._in_format

    def _begins_format(self) -> bool:
        if not self._awaits_format():
            return False
        text = self._pending.text.lstrip("\n")
        return not (OPENING_MARK.startswith(text) or text.startswith(OPENING_MARK))

    def _switch(self, found: str) -> list[Event]:
        """Act on a delimiter.  A stop string that equals another delimiter stops."""
        if found in self.options.stop_sequences and self._state in ("answer", "json"):
            self.stop_string = found
            self._state = "done"
            return [AnswerText(found)] if self.options.include_stop_string else []
        elif found == OPENING_MARK:
            self._tools = self._dsml()
            return [event for piece in self._pending.rest() for event in self._tools.push(piece.text)]
        elif self._state == "reasoning":
            self._drop_newlines = True
            self._enter(self._answer_state())
        elif self._state == "before_json" and found != THINK_END:
            self._enter("json")
            return [AnswerText(found)] if found in _BRACES else []
        elif found == _FENCE_END:
            self._spaced = False
            self._enter("after_json")
        return []  # a further </think> vanishes

    def _enter(self, state: str) -> None:
        self._state = state
        self._pending.restart(self._delimiters())

    def _emit(self, pieces: list[Piece]) -> list[Event]:
        if self._state == "reasoning":
            self._reasoning += [piece.text for piece in pieces]
            return [ReasoningText(piece.text, piece.extra) for piece in pieces]
        if self._state in ("before_json", "after_json"):
            if not pieces or self._spaced:
                return []
            self._spaced = True  # one space for all the text around the JSON, however it was cut
            return [AnswerText(" ")]
        return [AnswerText(piece.text, piece.extra) for piece in pieces]

    def _dsml(self) -> DsmlParser:
        thinking = self.options.thinking_initial_stage is not None
        return DsmlParser(lambda index: self._new_id(index, thinking and not self._reasoning))
