"""Log-probabilities in the two shapes that OpenAI has: Chat Completions and Completions."""

from __future__ import annotations

from typing import Any

from deepinfer.outputs import TokenLogprob
from deepinfer.recipe import Tokenizer

LOWEST = -9999.0  # JSON has no -Infinity


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; `bytes:\\xe2\\x98` for a piece of a character, so that different tokens stay different."""
    spelling = tokenizer.bytes_of(token_id)
    try:
        return spelling.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def chat_logprobs(tokenizer: Tokenizer, logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
    """Entries of `choices[].logprobs.content`."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text, spelling = token_text(tokenizer, token_id), tokenizer.bytes_of(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(spelling)}

    return [
        entry(item.token_id, item.logprob) | {"top_logprobs": [entry(*candidate) for candidate in item.top]}
        for item in logprobs
    ]


def completion_logprobs(tokenizer: Tokenizer, logprobs: list[TokenLogprob], offset: int) -> dict[str, Any]:
    """`choices[].logprobs` of Completions; `offset` is where the first token starts in the text, in characters."""
    tokens = [token_text(tokenizer, item.token_id) for item in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(item.logprob) for item in logprobs],
        "top_logprobs": [
            {token_text(tokenizer, token_id): _finite(logprob) for token_id, logprob in item.top} for item in logprobs
        ],
        "text_offset": offsets,
    }
