"""One sequence and its grammar: free generation, the trigger, then the structure."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

import numpy as np

from deepinfer.structured.backend import Automaton, Backend, CompiledGrammar, GrammarError
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)
EVERYTHING = -1  # a word of ones
STRUCTURED_OUTPUT = "structured output: "  # errors of a request whose grammar cannot go on begin so


class Grammar:
    """A compiled constraint. Cheap to keep, safe to share between threads."""

    def __init__(self, constraint: Constraint, compiled: CompiledGrammar, backend: Backend, vocabulary: Vocabulary):
        self.constraint, self.compiled, self.backend = constraint, compiled, backend
        self.eos_token_ids = frozenset(vocabulary.eos_token_ids)
        self.free_row = np.full(vocabulary.num_words, EVERYTHING, np.int32)
        for token_id in vocabulary.eos_token_ids:  # an output may not end before its structure has begun
            _clear(self.free_row, token_id)

    def behind(self, constraint: Constraint) -> Grammar:
        """The same grammar with the trigger of `constraint`."""
        grammar = copy.copy(self)
        grammar.constraint = constraint
        return grammar

    def matcher(self) -> Matcher:
        return Matcher(self)


class Matcher:
    """Where one sequence is. Used by one thread at a time.

    A matcher that has `failed` allows nothing any more: its sequence ends with an error, which `failed` is.
    """

    __slots__ = ("grammar", "failed", "_trigger", "_bound", "_recent", "_forced", "_automaton", "_free")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.failed: str | None = None
        self._trigger = grammar.constraint.trigger_token_ids
        self._bound = grammar.constraint.bound_token_id
        self._recent: tuple[int, ...] = ()  # the latest tokens of free generation, as many as the trigger has
        self._forced: int | None = None  # how much of the trigger is written, behind the bound token
        self._free = bool(self._trigger)
        self._automaton: Automaton = grammar.compiled.automaton()

    @property
    def automaton(self) -> Automaton | None:
        """What decides on the next token; None while that is not the grammar."""
        return None if self._free or self.failed else self._automaton

    def accept(self, token_id: int) -> None:
        """Take in a token of the sequence. One that was not allowed makes the matcher fail."""
        if token_id in self.grammar.eos_token_ids:
            return  # the sequence is over
        if self._free:
            self._accept_free(token_id)
        elif self.failed is None and not self._automaton.accept(token_id):
            self.fail(f"token {token_id} is not allowed here")

    def _accept_free(self, token_id: int) -> None:
        if self._forced is not None:
            self._forced += 1
            self._free = self._forced < len(self._trigger)
            return
        self._recent = (*self._recent, token_id)[-len(self._trigger) :]
        if self._recent == self._trigger:
            self._free = False
        elif token_id == self._bound:
            self._forced = 0

    def fail(self, reason: str) -> None:
        logger.error("a grammar failed: %s", reason)
        self.failed = STRUCTURED_OUTPUT + reason

    def fill_masks(self, drafts: Sequence[int], rows: np.ndarray) -> None:
        """Masks int32 [1 + len(drafts), W]: row 0 of the next token, row j of the one behind drafts[:j].

        Behind a draft that is not allowed, or ends the sequence, rows are all ones: nobody will use them. Nothing has
        changed on return.
        """
        self._fill(rows[0])
        if not drafts:
            return
        rows[1:] = EVERYTHING
        before = (self._recent, self._forced, self._free)
        num_accepted = 0
        for draft, row, behind in zip(drafts, rows[:-1], rows[1:], strict=True):
            is_allowed = row[draft >> 5] >> (draft & 31) & 1
            if self.failed or not is_allowed or draft in self.grammar.eos_token_ids:
                break
            if self._free:
                self._accept_free(draft)
            elif self._automaton.accept(draft):
                num_accepted += 1
            else:
                break
            self._fill(behind)
        try:
            self._automaton.rollback(num_accepted)
        except GrammarError as error:
            self.fail(str(error))
        self._recent, self._forced, self._free = before

    def _fill(self, row: np.ndarray) -> None:
        if self.failed:
            row[:] = 0
        elif not self._free:
            try:
                self._automaton.fill_mask(row)
            except GrammarError as error:
                row[:] = 0
                self.fail(str(error))
        elif self._forced is None:
            row[:] = self.grammar.free_row
        else:
            row[:] = 0
            _set(row, self._trigger[self._forced])


def _set(row: np.ndarray, token_id: int) -> None:
    row.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def _clear(row: np.ndarray, token_id: int) -> None:
    row.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)


def fill_next(matchers: Sequence[tuple[Matcher, int]], bitmask: np.ndarray) -> None:
    """Write the mask of the next token of each matcher into its row of int32 [R, W]; grammars work in parallel."""
    active = []
    for matcher, row in matchers:
        if matcher.automaton is None:
            matcher.fill_masks((), bitmask[row : row + 1])
        else:
            active.append((matcher, row))
    if len(active) == 1:
        active[0][0].fill_masks((), bitmask[active[0][1] :])
    elif active:
        backend = active[0][0].grammar.backend
        failures = backend.fill_masks([m.automaton for m, _ in active], [row for _, row in active], bitmask)
        for number, reason in failures:
            matcher, row = active[number]
            matcher.fail(reason)
            bitmask[row] = 0
