"""Log-probabilities as Completions reports them (Chat Completions: deepinfer.recipe)."""

from __future__ import annotations

from collections.abc import Sequence
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
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    count: int,
    offset: int,
    by_id: bool = False,
) -> tuple[dict[str, Any], int]:
    """`choices[].logprobs` of Completions, and the offset behind it.

    Of each token its own log-probability, and beside it those of the `count` most likely ones; None for the first token
    of a prompt.  `offset` is where the first token starts in the text, in characters.  Tokens are named by their text,
    or `by_id`.
    """

    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if by_id else token_text(tokenizer, token_id)

    def top(item: TokenLogprob) -> dict[str, float]:
        found = {name(token_id): finite(logprob) for token_id, logprob in item.top[:count]}
        found.setdefault(name(item.token_id), finite(item.logprob))
        return found

    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(token_text(tokenizer, token_id))
    return {
        "tokens": [name(token_id) for token_id in token_ids],
        "token_logprobs": [None if item is None else finite(item.logprob) for item in logprobs],
        "top_logprobs": [None if item is None else top(item) for item in logprobs],
        "text_offset": offsets,
    }, offset


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob | None], count: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: of each token, by IDs, it and the `count` likeliest; None for the first."""

    def entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token_id)}

    def entries(item: TokenLogprob) -> dict[str, dict[str, Any]]:
        found = {str(item.token_id): entry(item.token_id, item.logprob, item.rank)}
        for rank, (token_id, logprob) in enumerate(item.top[:count], 1):
            found.setdefault(str(token_id), entry(token_id, logprob, rank))
        return found

    return [None if item is None else entries(item) for item in logprobs]
