"""What clients and the model wrote, in the log: only where that was asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.recipe.tokenizer import Tokenizer

logger = logging.getLogger("deepinfer.server.content")


@dataclass(frozen=True)
class ContentLog:
    """`requests`: the bodies of requests; `outputs`: what was generated; of each at most `max_length` characters."""

    requests: bool = False
    outputs: bool = False
    max_length: int = 4096

    def asked(self, request_id: str, body: bytes | bytearray) -> None:
        if self.requests:
            text = body[: 4 * self.max_length].decode("utf-8", errors="replace")[: self.max_length]
            logger.info("%s asks %r", request_id, text, extra={"fields": {"request_id": request_id, "body": text}})

    def answered(self, request_id: str, tokenizer: Tokenizer, token_ids: Sequence[int], reason: str) -> None:
        """A sequence ended. Its text is that of its tokens: a chat's reasoning and control tokens included."""
        if self.outputs:
            # A model may have tokens that the tokenizer does not know, to pad its vocabulary.
            known = [token_id for token_id in token_ids[: self.max_length] if token_id < tokenizer.vocab_size]
            text = tokenizer.decode(known)[: self.max_length]
            fields = {"request_id": request_id, "output": text, "finish_reason": reason}
            logger.info("%s is answered %r (%s)", request_id, text, reason, extra={"fields": fields})
