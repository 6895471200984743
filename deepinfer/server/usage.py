"""One count of tokens for every route, streaming or not; recipe spells it in each protocol's words."""

from __future__ import annotations

from typing import Any

from deepinfer.recipe import Usage
from deepinfer.recipe.chat_stream import chat_usage


def usage_body(prompt_tokens: int, completion_tokens: int, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """Usage of Chat Completions and Completions: recipe's, over all choices of a request."""
    return chat_usage(Usage(prompt_tokens, 0, completion_tokens, reasoning_tokens))
