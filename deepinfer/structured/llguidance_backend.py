"""Grammars by llguidance: a lexer of regex derivatives below an Earley parser, both built as they are needed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import numpy as np

from deepinfer.structured.backend import TOO_COMPLEX, GrammarError, Run, at_once, fill_behind
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.lark import to_lark
from deepinfer.structured.vocabulary import Vocabulary

# Objects of some thousand properties need long rows; a step that needs more than these takes tens of milliseconds.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 20_000,
    "step_max_items": 100_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 100_000,
    "verbose_errors": False,  # they would tell the log what the output is
}
MOST_THREADS = 8  # that fill masks
_FULL = "too many states"


class LLGuidanceBackend:
    """llguidance: grammars in its dialect of Lark; a mask is computed where it is wanted."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        wrapper = llguidance.TokenizerWrapper(_Tokenizer(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(
            wrapper, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_token_ids) or None
        )
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._executor = llguidance.LLExecutor(min(os.cpu_count() or 1, MOST_THREADS))
        self._num_words = vocabulary.num_words
        self._eos_token_ids = vocabulary.eos_token_ids

    def write(self, constraint: Constraint) -> str:
        return to_lark(constraint, self._eos_token_ids)

    def build(self, grammar: str, run: Run = at_once) -> LLGuidanceGrammar:
        def new() -> llguidance.LLMatcher:
            return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

        matcher = run(new)
        if matcher.is_error():
            raise ValueError(f"so_args.schema: {_reason(matcher)}")
        compiled = LLGuidanceGrammar(matcher, new, self._num_words)
        try:
            row = np.zeros(self._num_words, np.int32)
            automaton = compiled.automaton()
            automaton.fill_mask(row)
        except GrammarError as error:
            raise ValueError(f"so_args.schema: {error}") from None
        if not row.any():
            raise ValueError("so_args.schema: no output satisfies it")
        token_id = int(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[-1])
        if token_id not in self._eos_token_ids and not automaton.accept((token_id,)):
            raise ValueError(TOO_COMPLEX)  # of its limits, accepting alone knows some
        return compiled

    def accept(self, automata: Sequence[LLGuidanceAutomaton], token_ids: Sequence[Sequence[int]]) -> list[int]:
        if any(len(tokens) != 1 for tokens in token_ids):
            return [automaton.accept(tokens) for automaton, tokens in zip(automata, token_ids, strict=True)]
        pairs = [(automaton.matcher, tokens[0]) for automaton, tokens in zip(automata, token_ids, strict=True)]
        counts = list(map(int, self._executor.consume_token_par(pairs)))
        for number, automaton in enumerate(automata):
            if counts[number]:
                automaton.token_ids += token_ids[number]
            else:  # why, only try_consume tells
                automaton.begin_again()
                counts[number] = automaton.accept(token_ids[number])
        return counts

    def fill_masks(
        self,
        automata: Sequence[LLGuidanceAutomaton],
        drafts: Sequence[Sequence[int]],
        rows: Sequence[int],
        bitmask: np.ndarray,
    ) -> list[tuple[int, str]]:
        matchers = [automaton.matcher for automaton in automata]
        num_rows, num_words = bitmask.shape
        target = (bitmask.ctypes.data, 4 * num_words, num_rows)
        if any(drafts):
            ahead = [(m, row, list(tokens)) for m, row, tokens in zip(matchers, rows, drafts, strict=True) if tokens]
            self._executor.unsafe_compute_mask_ptr_with_draft_token(ahead, *target)
        alone = [(m, row) for m, row, tokens in zip(matchers, rows, drafts, strict=True) if not tokens]
        if alone:
            self._executor.unsafe_compute_mask_ptr(alone, *target)
        failures = []
        for i, matcher in enumerate(matchers):
            if matcher.is_error():
                try:
                    automata[i].begin_again()
                    fill_behind(automata[i], drafts[i], bitmask[rows[i] : rows[i] + 1 + len(drafts[i])])
                except GrammarError as error:
                    failures.append((i, str(error)))
        return failures


class LLGuidanceGrammar:
    """Its matchers are copies of `root`. They share the states of one lexer, whose number is limited for good."""

    def __init__(self, root: llguidance.LLMatcher, new: Callable[[], llguidance.LLMatcher], num_words: int) -> None:
        self.root, self._new, self.num_words = root, new, num_words

    def automaton(self) -> LLGuidanceAutomaton:
        return LLGuidanceAutomaton(self)

    def replace(self, full: llguidance.LLMatcher) -> None:
        """Go on with a new lexer, which knows no states yet, unless that has been done."""
        if self.root is full:
            self.root = self._new()


class LLGuidanceAutomaton:
    """A matcher of llguidance."""

    __slots__ = ("matcher", "token_ids", "_grammar", "_root")

    def __init__(self, grammar: LLGuidanceGrammar) -> None:
        self.token_ids: list[int] = []  # that were accepted
        self._grammar, self._root = grammar, grammar.root
        self.matcher = self._root.deep_copy()

    @property
    def exhausted(self) -> str | None:
        return _reason(self.matcher) if self.matcher.is_error() else None

    def accept(self, token_ids: Sequence[int]) -> int:
        count = self._accept(token_ids)
        if self._is_full:
            self.begin_again()
            count += self._accept(token_ids[count:])
        return count

    def _accept(self, token_ids: Sequence[int]) -> int:
        # try_consume leaves the matcher usable where consume would break it.
        count = self.matcher.try_consume_tokens(list(token_ids))
        self.token_ids += token_ids[:count]
        return count

    def fill_mask(self, row: np.ndarray) -> None:
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._is_full:
            self.begin_again()
            self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self.matcher.is_error():
            raise GrammarError(_reason(self.matcher))

    def rollback(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        del self.token_ids[-num_tokens:]
        if not self.matcher.rollback(num_tokens):
            raise GrammarError(_reason(self.matcher))

    @property
    def _is_full(self) -> bool:
        return self.matcher.is_error() and _FULL in self.matcher.get_error()

    def begin_again(self) -> None:
        """Behind the same tokens, after an error; if the lexer is full, without what it met in other texts."""
        if self._is_full:
            self._grammar.replace(self._root)
        self._root = self._grammar.root
        self.matcher = self._root.deep_copy()
        self.matcher.try_consume_tokens(self.token_ids)
        row = np.empty(self._grammar.num_words, np.int32)
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)  # some limits are of a step with its mask


def _reason(matcher: llguidance.LLMatcher) -> str:
    """The first line of what the library says: the others show its state, and the grammar."""
    text = matcher.get_error().strip()
    if text.startswith("NoExtension"):
        return "no output satisfies it"
    lines = text.split("\n")
    if "regex parse error" in lines[0]:
        detail = [line[7:] for line in lines if line.startswith("error: ")]
        return f"not a regular expression that is supported: {', '.join(detail) or lines[0]}: {lines[1].strip()[:200]}"
    line = re.sub(r"^(at \d+\(\d+\): )?(failed to (compile JSON schema|parse \"%json\"): )?", "", lines[0])
    if line.startswith("oneOf"):  # it goes on with an option that nobody here has
        return "oneOf is not supported where its options cannot be told apart"
    return line[:300] + ("..." if len(line) > 300 else "")


class _Tokenizer:
    """What TokenizerWrapper wants to see."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0] if vocabulary.eos_token_ids else 0
        padding = [b""] * (vocabulary.size - len(vocabulary.token_bytes))
        self.tokens = [*vocabulary.token_bytes, *padding]
        self.special_token_ids = sorted({*vocabulary.control_ids, *vocabulary.eos_token_ids})
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode("utf-8") if isinstance(text, bytes) else text)
