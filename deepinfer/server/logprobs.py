"""Log-probabilities as Completions reports them (Chat Completions: deepinfer.recipe)."""

from __future__ import annotations

from typing import Any

from deepinfer.outputs import TokenLogprob
from deepinfer.recipe import Tokenizer

LOWEST = -9999.0  # JSON has no -Infinity


def finite(logprob: float) -> float:
    """-inf (a token that force_topk left out) as a number that JSON has."""
    return max(logprob, LOWEST)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; `bytes:\\xe2\\x98` for a piece of a character, so that different tokens stay different."""
    spelling = tokenizer.bytes_of(token_id)
    try:
        return spelling.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def completion_logprobs(
    tokenizer: Tokenizer, logprobs: list[TokenLogprob], offset: int, by_id: bool = False
) -> tuple[dict[str, Any], int]:
    """`choices[].logprobs` of Completions, and the offset behind it.

    `offset` is where the first token starts in the text, in characters.  Tokens are named by their text, or `by_id`.
    """

    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if by_id else token_text(tokenizer, token_id)

    offsets = []
    for item in logprobs:
        offsets.append(offset)
        offset += len(token_text(tokenizer, item.token_id))
    return {
        "tokens": [name(item.token_id) for item in logprobs],
        "token_logprobs": [finite(item.logprob) for item in logprobs],
        "top_logprobs": [{name(token_id): finite(logprob) for token_id, logprob in item.top} for item in logprobs],
        "text_offset": offsets,
    }, offset
