"""One sequence and its grammar: free generation, the trigger, then the structure."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Sequence

import numpy as np

from deepinfer.structured.backend import Automaton, Backend, CompiledGrammar, GrammarError, fill_behind
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)
EVERYTHING = -1  # a word of ones
STRUCTURED_OUTPUT = "structured output: "  # errors of a request whose grammar cannot go on begin so
GRAMMAR_LIMIT = "grammar_limit"  # stop reason of a sequence whose grammar became too complex


class Grammar:
    """A compiled constraint. Cheap to keep, safe to share between threads."""

    def __init__(self, constraint: Constraint, compiled: CompiledGrammar, backend: Backend, vocabulary: Vocabulary):
        self.constraint, self.compiled, self.backend = constraint, compiled, backend
        self.eos_token_ids = frozenset(vocabulary.eos_token_ids)
        self.free_row = np.full(vocabulary.num_words, EVERYTHING, np.int32)
        for token_id in vocabulary.eos_token_ids:  # an output may not end before its structure has begun
            _clear(self.free_row, token_id)

    def behind(self, constraint: Constraint) -> Grammar:
        """The same grammar with the trigger of `constraint`. Raises ValueError if it holds what ends an output."""
        for name, token_ids in constraint.token_ids.items():
            if not self.eos_token_ids.isdisjoint(token_ids):
                raise ValueError(f"{name} must not hold a token that ends an output, got {list(token_ids)}")
        grammar = copy.copy(self)
        grammar.constraint = constraint
        return grammar

    def matcher(self) -> Matcher:
        """A new one, at the beginning."""
        return Matcher(self)


class Matcher:
    """Where one sequence is. Used by one thread at a time.

    A matcher that has `failed` allows nothing any more: its sequence ends with an error, which `failed` is, or as it is
    if only the grammar library is `exhausted`: what was written so far is right.
    """

    __slots__ = (
        "grammar",
        "exhausted",
        "_failed",
        "_trigger",
        "_bound",
        "_recent",
        "_forced",
        "_automaton",
        "_unread",
        "_free",
    )

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.exhausted = False
        self._failed: str | None = None
        self._trigger = grammar.constraint.trigger_token_ids
        self._bound = grammar.constraint.bound_token_id
        self._recent: tuple[int, ...] = ()  # the latest tokens of free generation, as many as the trigger has
        self._forced: int | None = None  # how much of the trigger is written, behind the bound token
        self._free = bool(self._trigger)
        self._automaton: Automaton = grammar.compiled.automaton()
        self._unread: list[int] = []  # accepted tokens that the automaton does not know yet

    @property
    def failed(self) -> str | None:
        _catch_up([self])
        return self._failed

    def accept(self, token_id: int) -> None:
        """Take in a token of the sequence. One that was not allowed makes the matcher fail."""
        if token_id in self.grammar.eos_token_ids:
            return  # the sequence is over
        if self._free:
            self._accept_free(token_id)
        elif self._failed is None:
            self._unread.append(token_id)

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
        self._failed = STRUCTURED_OUTPUT + reason

    def exhaust(self, reason: str) -> None:
        logger.warning("a grammar became too complex: %s", reason)
        self._failed, self.exhausted = STRUCTURED_OUTPUT + reason, True

    def fill_masks(self, drafts: Sequence[int], rows: np.ndarray) -> None:
        """`fill_masks` of this matcher alone, into int32 [1 + len(drafts), W]."""
        fill_masks([(self, 0, drafts)], rows)

    def _fill_free(self, drafts: Sequence[int], rows: np.ndarray) -> None:
        """From a place where the tokens are not the grammar's business; behind the drafts they may be."""
        before = (self._recent, self._forced, self._free)
        for position, row in enumerate(rows):
            if not self._free:
                try:
                    fill_behind(self._automaton, drafts[position:], rows[position:])
                except GrammarError as error:
                    self.exhaust(str(error))
                break
            if self._forced is None:
                row[:] = self.grammar.free_row
            else:
                row[:] = 0
                _set(row, self._trigger[self._forced])
            if position == len(drafts) or not _allows(row, drafts[position]):
                break
            self._accept_free(drafts[position])
        self._recent, self._forced, self._free = before


def fill_masks(wanted: Sequence[tuple[Matcher, int, Sequence[int]]], bitmask: np.ndarray) -> None:
    """Masks of the next token of each matcher and of those behind its drafts, grammars in parallel.

    (matcher, r, drafts) fills row r of int32 [R, W] for the next token and row r + j for the one behind drafts[:j].
    Behind a draft that is not allowed, or ends the sequence, rows are all ones: nobody will use them. All matchers are
    where they were on return.
    """
    _catch_up([matcher for matcher, _, _ in wanted])
    active = []
    for matcher, row, drafts in wanted:
        if drafts:
            bitmask[row + 1 : row + 1 + len(drafts)] = EVERYTHING
            drafts = _before_end(drafts, matcher.grammar.eos_token_ids)
        if matcher._failed:
            bitmask[row] = 0
        elif matcher._free:
            matcher._fill_free(drafts, bitmask[row : row + 1 + len(drafts)])
        else:
            active.append((matcher, row, drafts))
    if not active:
        return
    matchers, rows, all_drafts = zip(*active, strict=True)
    backend = matchers[0].grammar.backend
    for number, reason in backend.fill_masks([m._automaton for m in matchers], all_drafts, rows, bitmask):
        matchers[number].exhaust(reason)
        bitmask[rows[number]] = 0


def _before_end(drafts: Sequence[int], eos_token_ids: Collection[int]) -> Sequence[int]:
    for number, draft in enumerate(drafts):
        if draft in eos_token_ids:
            return drafts[:number]
    return drafts


def _catch_up(matchers: Sequence[Matcher]) -> None:
    """Let the automata read what was accepted since the last mask."""
    behind = [matcher for matcher in matchers if matcher._unread]
    if not behind:
        return
    unread = [matcher._unread for matcher in behind]
    counts = behind[0].grammar.backend.accept([matcher._automaton for matcher in behind], unread)
    for matcher, token_ids, count in zip(behind, unread, counts, strict=True):
        matcher._unread = []
        reason = matcher._automaton.exhausted
        if reason is not None:
            matcher.exhaust(reason)
        elif count < len(token_ids):
            matcher.fail(f"token {token_ids[count]} is not allowed here")


def _allows(row: np.ndarray, token_id: int) -> bool:
    return bool(row[token_id >> 5] >> (token_id & 31) & 1)


def _set(row: np.ndarray, token_id: int) -> None:
    row.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def _clear(row: np.ndarray, token_id: int) -> None:
    row.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
