"""Walking a little way into a compiled grammar: what is too slow or too complex there is refused before it is used."""

from __future__ import annotations

import time
from collections.abc import Collection

import numpy as np

from deepinfer.structured.backend import TOO_COMPLEX, CompiledGrammar, GrammarError

MASK_SECONDS = 0.05  # of CPU that the mask of a step may take
USUAL_SECONDS = 0.002  # a walk whose masks take no longer is a short one
SHORT_STEPS, LONG_STEPS = 16, 256
LONG_SECONDS = 0.5  # of CPU for a long walk


def try_out(grammar: CompiledGrammar, num_words: int, eos_token_ids: Collection[int]) -> None:
    """Raises ValueError if a step near the beginning cannot be made, or takes too much time.

    What becomes too complex only behind that ends its sequences there (`Matcher.exhausted`).
    """
    automaton, row = grammar.automaton(), np.zeros(num_words, np.int32)
    begin, slowest = time.thread_time(), 0.0
    for step in range(LONG_STEPS):
        start = time.thread_time()
        if step >= SHORT_STEPS and (slowest < USUAL_SECONDS or start - begin > LONG_SECONDS):
            return
        try:
            automaton.fill_mask(row)
        except GrammarError as error:
            raise ValueError(f"{TOO_COMPLEX}: {error}") from None
        slowest = max(slowest, time.thread_time() - start)
        if slowest > MASK_SECONDS:
            raise ValueError(f"{TOO_COMPLEX}: it would slow down every step")
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if not len(allowed) or (token_id := int(allowed[len(allowed) // 2])) in eos_token_ids:
            return
        if not automaton.accept((token_id,)):  # a limit of the library that masks do not notice
            raise ValueError(TOO_COMPLEX)
