"""The interface of the grammar libraries, and the choice among them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from deepinfer.structured.constraint import Constraint
from deepinfer.structured.vocabulary import Vocabulary

BACKENDS = ("llguidance", "xgrammar")
TOO_COMPLEX = "so_args.schema is too complex"


class Automaton(Protocol):
    """Where one sequence is in its grammar. A bit of a mask is a token id, from the lowest bit of word 0 on."""

    @property
    def exhausted(self) -> str | None:
        """Why the library can go no further here, whatever the grammar allows."""
        ...

    def accept(self, token_ids: Sequence[int]) -> int:
        """Take tokens in, up to the first that the grammar forbids; -> how many they were."""
        ...

    def fill_mask(self, row: np.ndarray) -> None:
        """Write the tokens that may come next into int32 [W]. Raises GrammarError if that cannot be found out."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo so many accepted tokens."""
        ...


class CompiledGrammar(Protocol):
    """A grammar of a library, ready for use."""

    def automaton(self) -> Automaton:
        """A new one, at the beginning."""
        ...


Result = TypeVar("Result")


class Run(Protocol):
    """Calls a function that takes long, maybe in another thread; see `Backend.build`."""

    def __call__(self, function: Callable[[], Result]) -> Result: ...


def at_once(function: Callable[[], Result]) -> Result:
    """A `Run` that just calls it."""
    return function()


class Backend(Protocol):
    """A grammar library."""

    name: str

    def write(self, constraint: Constraint) -> str:
        """The grammar in the library's own words, for `build`.

        Raises ValueError naming the field for what is malformed or cannot be enforced.
        """
        ...

    def build(self, grammar: str, run: Run = at_once) -> CompiledGrammar:
        """Raises ValueError for what nothing satisfies, or is too complex.

        `run` calls what takes long without holding the GIL, maybe in another thread.
        """
        ...

    def accept(self, automata: Sequence[Any], token_ids: Sequence[Sequence[int]]) -> list[int]:
        """`accept` of several, in parallel where possible; one that is given a forbidden token is of no further use."""
        ...

    def fill_masks(
        self, automata: Sequence[Any], drafts: Sequence[Sequence[int]], rows: Sequence[int], bitmask: np.ndarray
    ) -> list[tuple[int, str]]:
        """`fill_behind` of several, in parallel where possible: automaton i from row rows[i] of int32 [R, W] on.

        Returns (i, reason) of those that failed.
        """
        ...


class GrammarError(Exception):
    """A grammar that became too complex while it was used."""


def fill_behind(automaton: Automaton, drafts: Sequence[int], bitmask: np.ndarray) -> None:
    """Masks int32 [1 + len(drafts), W]: row 0 of the next token, row j of the one behind drafts[:j], if it is allowed.

    The automaton is where it was on return. Raises GrammarError.
    """
    automaton.fill_mask(bitmask[0])
    num_accepted = 0
    for draft, row in zip(drafts, bitmask[1:], strict=True):
        if not automaton.accept((draft,)):
            break
        num_accepted += 1
        automaton.fill_mask(row)
    automaton.rollback(num_accepted)


def make_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """Raises ValueError for an unknown backend, or one that is not installed."""
    if name not in BACKENDS:
        raise ValueError(f"DEEPINFER_GRAMMAR_BACKEND must be one of {', '.join(BACKENDS)}, got {name!r}")
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"grammar backend {name} is not installed: pip install 'deepinfer[{name}]'")
    if name == "llguidance":
        from deepinfer.structured.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(vocabulary)
    from deepinfer.structured.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(vocabulary)
