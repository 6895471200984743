"""What a grammar compiler needs to know of a model's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """`token_bytes[id]` is what a token stands for, `control_ids` are those that match no text, whatever their bytes.

    `size` is the model's: ids from len(token_bytes) on have no text. `encode` gives the tokens of a text: where a
    grammar leaves only one text, it is written in them.
    """

    token_bytes: Sequence[bytes]
    control_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    size: int
    encode: Callable[[str], list[int]]

    @property
    def num_words(self) -> int:
        """int32 words of a bitmask."""
        return (self.size + 31) // 32
