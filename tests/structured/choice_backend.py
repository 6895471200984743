"""A grammar library of a few lines, for machines without one: an output is one of some texts, in one tokenisation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.structured.backend import Run, at_once, fill_behind
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.matcher import Grammar
from deepinfer.structured.vocabulary import Vocabulary


@dataclass
class Choice:
    """Both a compiled grammar and an automaton: the texts, and how much of one has been accepted."""

    texts: list[list[int]]
    eos_token_ids: tuple[int, ...]
    accepted: list[int] = field(default_factory=list)
    exhausted: None = None

    def automaton(self) -> Choice:
        return Choice(self.texts, self.eos_token_ids)

    def allowed(self) -> set[int]:
        length = len(self.accepted)
        begun = [text for text in self.texts if text[:length] == self.accepted]
        ends = self.eos_token_ids if self.accepted in begun else ()
        return {*ends, *(text[length] for text in begun if len(text) > length)}

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token_id in enumerate(token_ids):
            if token_id not in self.allowed():
                return count
            self.accepted.append(token_id)
        return len(token_ids)

    def fill_mask(self, row: np.ndarray) -> None:
        bits = np.zeros(32 * len(row), np.uint8)
        bits[list(self.allowed())] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def rollback(self, num_tokens: int) -> None:
        del self.accepted[len(self.accepted) - num_tokens :]


class ChoiceBackend:
    """A Backend and, for an engine, its compiler."""

    name = "choice"

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        self.vocabulary = vocabulary
        self.encode = encode

    def compile(self, so_args: Mapping[str, Any]) -> Future[Grammar]:
        constraint, compiled = Constraint.from_so_args(so_args), Future[Grammar]()
        compiled.set_result(Grammar(constraint, self.build(self.write(constraint)), self, self.vocabulary))
        return compiled

    def write(self, constraint: Constraint) -> str:
        assert constraint.schema_type == "choice"
        return constraint.schema

    def build(self, grammar: str, run: Run = at_once) -> Choice:
        return Choice([self.encode(text) for text in json.loads(grammar)], tuple(self.vocabulary.eos_token_ids))

    def accept(self, automata: Sequence[Choice], token_ids: Sequence[Sequence[int]]) -> list[int]:
        return [automaton.accept(ids) for automaton, ids in zip(automata, token_ids, strict=True)]

    def fill_masks(
        self, automata: Sequence[Choice], drafts: Sequence[Sequence[int]], rows: Sequence[int], bitmask: np.ndarray
    ) -> list[tuple[int, str]]:
        for automaton, row_drafts, row in zip(automata, drafts, rows, strict=True):
            fill_behind(automaton, row_drafts, bitmask[row : row + 1 + len(row_drafts)])
        return []
