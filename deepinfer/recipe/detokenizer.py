"""Incremental detokenisation: constant work a token, never half a character."""

import codecs
from collections.abc import Iterable

from deepinfer.recipe.tokenizer import Tokenizer

SILENT_ROLES = ("bos", "eos", "pad")


class Detokenizer:
    """Turns the token IDs of one sequence into text, as they come.

    BOS, EOS and pad give no text; other control tokens give their spelling, which the stream parser reads.  Bytes that
    cannot be UTF-8 become U+FFFD as soon as that is certain.
    """

    def __init__(self, tokenizer: Tokenizer, silent_roles: Iterable[str] = SILENT_ROLES) -> None:
        self._tokenizer = tokenizer
        self._silent = {tokenizer.control_ids[role] for role in silent_roles if role in tokenizer.control_ids}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that is certain after these tokens.  Raises ValueError for IDs outside the vocabulary."""
        return "".join(
            self._decoder.decode(self._tokenizer.bytes_of(token_id))
            for token_id in token_ids
            if token_id not in self._silent
        )

    def finish(self) -> str:
        """End of the sequence: an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
