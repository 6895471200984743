"""Incremental detokenisation: constant work a token, never half a character."""

import codecs
from collections.abc import Iterable

from deepinfer.recipe.tokenizer import Tokenizer

SILENT_ROLES = ("bos", "eos", "pad")


class Detokenizer:
    """Turns the token IDs of one sequence into text, as they come.

    BOS, EOS and pad give no text; other control tokens give their spelling, which the stream parser reads.  Bytes that
    cannot be UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, silent_roles: Iterable[str] = SILENT_ROLES) -> None:
        self._tokenizer = tokenizer
        self._silent = {tokenizer.control_ids[role] for role in silent_roles if role in tokenizer.control_ids}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._between_characters = True

    def push(self, token_ids: Iterable[int]) -> str:
        """Text of these tokens, up to the last one that ends a character; the others wait.

        Raises ValueError for IDs outside the vocabulary.
        """
        out: list[str] = []
        for token_id in token_ids:
            if token_id in self._silent:
                continue
            text = self._tokenizer.text_of(token_id)
            if text is not None and self._between_characters:
                out.append(text)
                continue
            self._held += self._decoder.decode(self._tokenizer.bytes_of(token_id))
            self._between_characters = not self._decoder.getstate()[0]
            if self._between_characters:
                out.append(self._held)
                self._held = ""
        return "".join(out)

    def plain(self, token_id: int) -> str:
        """Text of one token if it has whole characters only and nothing waits; else "", and nothing has changed."""
        if not self._between_characters or token_id in self._silent:
            return ""
        return self._tokenizer.text_of(token_id) or ""

    def finish(self) -> str:
        """End of the sequence: what waited, an unfinished character as U+FFFD."""
        held, self._held = self._held, ""
        return held + self._decoder.decode(b"", final=True)
