"""What is too large to be worth reading: checked on the raw request, before anything costly is done with it."""

from __future__ import annotations

from typing import Any

from deepinfer.server.errors import ApiError
from deepinfer.server.text_engine import TextEngine

MAX_VALUES = 1 << 20  # values in one body
MAX_CONTAINERS = 1 << 17  # objects and lists among them: these cost the most
MAX_ENTRIES = 16384  # of a field; lists of token IDs may fill the context
MAX_STOP_CHARS = 1024  # of one stop string or bad word
_COSTLY = ("messages", "input", "tools")  # each entry costs a token or more
_TOKEN_IDS = ("prompt", "tokens", "golden_token_ids", "input_ids", "token_ids")
_STOPS = ("stop", "stop_sequences", "bad_words")
_PROMPT_TEXTS = ("prompt", "input", "instructions", "system", "text")


def check_structure(body: bytes | bytearray) -> None:
    """ApiError 400 for more than MAX_VALUES values or MAX_CONTAINERS objects and lists, without parsing them."""
    if _within_limits(body):
        return  # the usual case, in which even what strings contain is little enough
    unquoted = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    if not _within_limits(b" ".join(unquoted)):
        message = f"the request body holds more than {MAX_VALUES} values, or {MAX_CONTAINERS} objects and lists"
        raise ApiError(message)


def _within_limits(body: bytes | bytearray) -> bool:
    return body.count(b"{") + body.count(b"[") <= MAX_CONTAINERS and body.count(b",") <= MAX_VALUES


def check_sizes(text: TextEngine, raw: dict[str, Any]) -> None:
    """ApiError 400 naming a field that has too many entries, or that can never fit into the context."""
    for name, value in raw.items():
        if isinstance(value, list | dict):
            most = MAX_ENTRIES
            if name in _TOKEN_IDS:
                most = max(most, text.max_model_len)
            elif name in _COSTLY:
                most = min(most, text.max_model_len)
            if len(value) > most:
                raise ApiError(f"{name[:200]} may hold at most {most} entries, got {len(value)}", param=name[:200])
        parts = value if isinstance(value, list) else [value]
        if name in _STOPS and any(isinstance(part, str) and len(part) > MAX_STOP_CHARS for part in parts):
            raise ApiError(f"{name}: an entry may have at most {MAX_STOP_CHARS} characters", param=name)
        if name in _PROMPT_TEXTS:
            for part in parts:
                if isinstance(part, str):
                    check_text(text, part, name)


def check_text(text: TextEngine, prompt: str, param: str) -> None:
    """ApiError 400 if the text has more bytes than the longest tokens could hold in a full context."""
    limit = text.max_model_len * text.tokenizer.longest_token
    if 4 * len(prompt) <= limit:  # no character has more than four bytes
        return
    if len(prompt) > limit or len(prompt.encode("utf-8")) > limit:
        raise ApiError(
            f"{param} is longer than {limit} bytes of UTF-8; this model's context of {text.max_model_len} tokens "
            f"cannot hold it",
            param=param,
            code="context_length_exceeded",
        )
