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


def completion_logprobs(tokenizer: Tokenizer, logprobs: list[TokenLogprob], offset: int) -> dict[str, Any]:
    """`choices[].logprobs` of Completions; `offset` is where the first token starts in the text, in characters."""
    tokens = [token_text(tokenizer, item.token_id) for item in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [finite(item.logprob) for item in logprobs],
        "top_logprobs": [
            {token_text(tokenizer, token_id): finite(logprob) for token_id, logprob in item.top} for item in logprobs
        ],
        "text_offset": offsets,
    }
