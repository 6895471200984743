"""Reading a tokenizer.json: everything that is used of it is checked here, so that a bad file is one ValueError."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_TOKEN_ID = (1 << 24) - 1  # tables have an entry for every ID up to the largest


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token IDs by spelling: those of the BPE model, and the added ones (which the model may list too)."""

    model: Mapping[str, int]
    added: Mapping[str, int]


def read_definition(path: str | Path) -> dict[str, Any]:
    """The object in a tokenizer.json.  Raises ValueError saying what is wrong with the file."""
    try:
        definition = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if not isinstance(definition, dict):
        raise ValueError(f"holds {type(definition).__name__}, allowed: a JSON object")
    return definition


def read_vocabulary(definition: Mapping[str, Any]) -> Vocabulary:
    """The tokens of a byte-level BPE tokenizer.  Raises ValueError naming the part or the token that is wrong."""
    model = definition.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise ValueError("model must be an object with a vocabulary: model.vocab, an object")
    if model.get("type", "BPE") != "BPE" or not _is_byte_level(definition.get("decoder")):
        raise ValueError("model must be BPE with a ByteLevel decoder")
    entries = definition.get("added_tokens", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("added_tokens must be a list of objects")
    for entry in entries:
        text = entry.get("content")
        if not isinstance(text, str) or not _is_unicode(text):
            raise ValueError(f"added_tokens: content must be text, got {text!r}")
        _check_id("added_tokens", text, entry.get("id"))
    for text, token_id in model["vocab"].items():
        _check_id("model.vocab", text, token_id)
    return Vocabulary(model["vocab"], {entry["content"]: entry["id"] for entry in entries})


def _check_id(part: str, text: str, token_id: Any) -> None:
    if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
        raise ValueError(f"{part}: token {text!r} has ID {token_id!r}, allowed: an integer in 0..{MAX_TOKEN_ID}")


def _is_byte_level(part: Any) -> bool:
    """A decoder, or a sequence of which one is."""
    if not isinstance(part, dict):
        return False
    decoders = part.get("decoders", [])
    nested = [one for one in decoders if isinstance(one, dict)] if isinstance(decoders, list) else []
    return part.get("type") == "ByteLevel" or any(one.get("type") == "ByteLevel" for one in nested)


def _is_unicode(text: str) -> bool:
    """False for a lone surrogate, which JSON can spell and UTF-8 cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in text)
