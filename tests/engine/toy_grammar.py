"""Real grammars over the toy model's vocabulary: token i stands for one character."""

from __future__ import annotations

import string
from functools import cache
from typing import Any

from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.structured.vocabulary import Vocabulary
from tests.engine.test_engine_workloads import EOS
from tests.engine.toy_model import VOCAB_SIZE

CHARACTERS = (string.ascii_letters + string.digits)[:VOCAB_SIZE]
REGEXES = ["[a-c]{1,9}", "([e-z][0-4]){2,}", "(abc|xyz|x0){1,6}", "[a-zA-Z0-8]*q"]


@cache
def compiler() -> GrammarCompiler:
    """Every constraint is compiled once for all tests."""
    return GrammarCompiler(lambda: Vocabulary(
        [character.encode() for character in CHARACTERS], frozenset(EOS), tuple(EOS), VOCAB_SIZE,
        lambda text: [CHARACTERS.index(character) for character in text],
    ))  # fmt: skip


def so_args(number: int) -> dict[str, Any]:
    """Structured output of one of REGEXES, every other time behind a trigger."""
    args: dict[str, Any] = {"schema_type": "regex", "schema": REGEXES[number % len(REGEXES)]}
    if number // len(REGEXES) % 2:
        args |= {"trigger_token_ids": [7], "bound_token_id": 11}
    return args


def text_of(token_ids: list[int]) -> str:
    """What the tokens in front of the end of sequence stand for."""
    return "".join(CHARACTERS[token_id] for token_id in token_ids if token_id not in EOS)
