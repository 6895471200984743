"""Engram's constants that no file holds: the compressed token map and the hash multipliers (spec: model, section 4)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from tokenizers import Regex, Tokenizer
from tokenizers.normalizers import NFD, NFKC, Lowercase, Replace, Sequence, Strip, StripAccents

UNDECODABLE = "\ufffd"  # the token is a part of a UTF-8 character
LONE_SPACE = "\ue000"  # stands for " " while the ends are stripped

NORMALIZER = Sequence(
    [
        NFKC(),
        NFD(),
        StripAccents(),
        Lowercase(),
        Replace(Regex(r"[ \t\r\n]+"), " "),
        Replace(Regex(r"^ $"), LONE_SPACE),
        Strip(),
        Replace(LONE_SPACE, " "),
    ]
)


def compressed_token_map(tokenizer: Tokenizer) -> np.ndarray:
    """Merges tokens that differ only in case, accents, width or surrounding whitespace.

    `tokenizer` is the raw backend of the `tokenizers` library. Returns int32 [vocab size, added tokens included]:
    token id -> compressed id, numbered in first-seen order.
    """
    seen: dict[str, int] = {}
    token_ids = range(tokenizer.get_vocab_size(with_added_tokens=True))
    texts = tokenizer.decode_batch([[token_id] for token_id in token_ids], skip_special_tokens=False)
    compressed = np.empty(len(texts), dtype=np.int32)
    for token_id, text in zip(token_ids, texts, strict=True):
        if UNDECODABLE in text:
            key = tokenizer.id_to_token(token_id) or text
        else:
            key = NORMALIZER.normalize_str(text) or text
        compressed[token_id] = seen.setdefault(key, len(seen))
    return compressed


@lru_cache(maxsize=64)
def engram_multipliers(layer_id: int, compressed_vocab_size: int) -> tuple[int, int, int, int]:
    """Four odd multipliers of a layer's hash, one a look-back; products with compressed ids stay below 2^63."""
    bound = (2**63 - 1) // compressed_vocab_size // 2
    drawn = np.random.default_rng(10007 * layer_id).integers(0, bound, size=4, dtype=np.int64)
    first, second, third, fourth = (2 * int(value) + 1 for value in drawn)
    return first, second, third, fourth
