"""Byte-level BPE tokenizer loaded from a tokenizer.json, with control tokens kept apart from ordinary text."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from deepinfer.recipe.control_tokens import CONTROL_TOKENS, REQUIRED_ROLES
from deepinfer.recipe.conversation import ModelVersion
from deepinfer.recipe.segments import SegmentCache, can_be_cut, cut
from deepinfer.recipe.tokenizer_file import read_definition, read_vocabulary


class Tokenizer:
    """Text to token IDs and back.

    ``encode_text`` knows no added vocabulary, so no text can become a control token; control tokens are had by role
    (``control_id``).  ``token_bytes[id]`` is what a token stands for: bytes of text, or the spelling of an added token.
    """

    def __init__(
        self,
        definition: Mapping[str, Any],
        model_version: ModelVersion = "v4.1",
        spelling: Mapping[str, str] | None = None,
    ) -> None:
        """Build from the parsed tokenizer.json.

        ``spelling`` overrides CONTROL_TOKENS for roles that this file spells otherwise.  Raises ValueError when the
        file is not a byte-level BPE tokenizer, or lacks a control token that prompts of ``model_version`` need.
        """
        vocabulary = read_vocabulary(definition)
        added = vocabulary.added
        self.model_version: ModelVersion = model_version
        self.added_ids = frozenset(added.values())
        self.control_ids = _find_control_ids(added, {**CONTROL_TOKENS, **(spelling or {})}, model_version)
        self.roles = {token_id: role for role, token_id in self.control_ids.items()}
        self.token_bytes = _token_bytes(vocabulary.model, added)
        self.vocab_size = len(self.token_bytes)
        self.longest_token = max(map(len, self.token_bytes), default=0)  # bytes
        self._plain = _plain_tokenizer(definition, added)
        self._can_be_cut = can_be_cut(definition)
        self._cache = SegmentCache()
        self._texts: dict[int, str | None] = {}  # of the tokens that ``text_of`` was asked for

    @classmethod
    def from_file(
        cls, path: str | Path, model_version: ModelVersion = "v4.1", spelling: Mapping[str, str] | None = None
    ) -> "Tokenizer":
        """Load a tokenizer.json.  Raises ValueError as ``Tokenizer`` does, naming the file."""
        try:
            return cls(read_definition(path), model_version, spelling)
        except ValueError as error:
            raise ValueError(f"tokenizer: {path}: {error}") from None

    def check_model(self, vocab_size: int, control_ids: Mapping[str, Collection[int]]) -> None:
        """Raise ValueError unless a model of ``vocab_size`` tokens, with these IDs by role, can use this tokenizer."""
        if self.vocab_size > vocab_size:
            token_id = self.vocab_size - 1
            text = self.token_bytes[token_id].decode("utf-8", errors="replace")
            raise ValueError(f"tokenizer: token {text!r} has ID {token_id}, but the model's vocab_size is {vocab_size}")
        for role, allowed in control_ids.items():
            if role in self.control_ids and self.control_ids[role] not in allowed:
                raise ValueError(
                    f"config: {role}_token_id is {', '.join(map(str, allowed)) or None}, "
                    f"but tokenizer.json's {role} token has ID {self.control_ids[role]}"
                )

    def control_id(self, role: str) -> int:
        """Token ID of a control token.  Raises ValueError when this tokenizer has none of that role."""
        if role not in self.control_ids:
            raise ValueError(f"tokenizer has no {role!r} token; it has {', '.join(self.control_ids)}")
        return self.control_ids[role]

    def encode_text(self, text: str) -> list[int]:
        """Token IDs of ordinary text; never an added token, whatever the text spells.

        Raises ValueError for a lone surrogate, which is no text.
        """
        try:
            return self._plain.encode(text, add_special_tokens=False).ids
        except TypeError:
            check_unicode([text])
            raise

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode_text`` of each, in parallel also within long texts; recent ones come from memory.

        The lists must not be changed.
        """
        try:
            return self._cache.encode(texts, self._encode_pieces)
        except TypeError:
            check_unicode(texts)
            raise

    def _encode_pieces(self, texts: list[str]) -> list[list[int]]:
        pieces = [cut(text) if self._can_be_cut else [text] for text in texts]
        flat = [piece for group in pieces for piece in group]
        encoded = iter(self._plain.encode_batch_fast(flat, add_special_tokens=False))
        return [[token_id for _ in group for token_id in next(encoded).ids] for group in pieces]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token IDs, control tokens by their spelling, U+FFFD for bytes that are not UTF-8.

        Raises ValueError for IDs outside the vocabulary.
        """
        return b"".join(self.bytes_of(token_id) for token_id in token_ids).decode("utf-8", errors="replace")

    def bytes_of(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token ID {token_id} is outside the vocabulary of {self.vocab_size}")
        return self.token_bytes[token_id]

    def text_of(self, token_id: int) -> str | None:
        """Text of a token, None for one that is only a part of characters.  Raises ValueError as ``bytes_of`` does."""
        try:
            return self._texts[token_id]
        except KeyError:
            try:
                text = self.bytes_of(token_id).decode("utf-8")
            except UnicodeDecodeError:
                text = None
            self._texts[token_id] = text
            return text


def check_unicode(texts: Iterable[str]) -> None:
    """Raise ValueError for a lone surrogate (of JSON, or of an argument that is not UTF-8): it has no bytes."""
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"text must be Unicode, character {error.start} is a lone surrogate") from None


def _find_control_ids(added: Mapping[str, int], spelling: Mapping[str, str], version: ModelVersion) -> dict[str, int]:
    found = {role: added[text] for role, text in spelling.items() if text in added}
    missing = [f"{role} ({spelling[role]})" for role in REQUIRED_ROLES[version] if role not in found]
    if missing:
        raise ValueError(f"lacks control tokens that {version} prompts need: {', '.join(missing)}")
    return found


def _plain_tokenizer(definition: Mapping[str, Any], added: Mapping[str, int]) -> tokenizers.Tokenizer:
    """The same tokenizer without its added tokens, also where the BPE vocabulary itself lists them."""
    model = dict(definition["model"])
    model["vocab"] = {text: token_id for text, token_id in model["vocab"].items() if text not in added}
    plain = {**definition, "model": model, "added_tokens": [], "truncation": None, "padding": None}
    plain["post_processor"] = None
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises bare Exception, here also when a merge makes an added token
        raise ValueError(f"cannot be used without its added tokens: {error}") from error


def _token_bytes(vocabulary: Mapping[str, int], added: Mapping[str, int]) -> list[bytes]:
    """Bytes by token ID; IDs that the file leaves out stand for nothing."""
    to_byte = {char: byte for byte, char in enumerate(_byte_characters())}
    table = [b""] * (max([*vocabulary.values(), *added.values()], default=-1) + 1)
    for text, token_id in vocabulary.items():
        if text not in added:
            try:
                table[token_id] = bytes(to_byte[char] for char in text)
            except KeyError:
                raise ValueError(f"token {text!r} is not in byte-level spelling") from None
    for text, token_id in added.items():
        table[token_id] = text.encode("utf-8")
    return table


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte value (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]
