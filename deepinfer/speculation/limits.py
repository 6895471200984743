"""How many drafts a sequence may have in a step, checked when the engine starts, and what they take."""

from __future__ import annotations

from typing import Any

from deepinfer.config.engine import EngineConfig
from deepinfer.config.speculative import DEFAULT_NGRAM_DRAFTS


def num_drafts(config: EngineConfig, model: Any = None) -> int:
    """Most drafts of a sequence in a step; 0 without speculation.

    Raises ValueError if the model cannot verify drafts, has no draft head, or one that makes fewer, or if the caches
    could not take so many back.
    """
    speculative = config.speculative_config
    if speculative is None:
        return 0
    if not getattr(model, "verifies_drafts", True):
        raise ValueError("speculative_config must be unset for this model: it cannot take tokens back")
    count = speculative.num_speculative_tokens
    if speculative.method == "dspark":
        if config.torch_compile:
            raise ValueError("torch_compile must be false with speculative method dspark")
        head = getattr(model, "draft_head", None)
        if head is None:
            raise ValueError("speculative method must not be dspark: the checkpoint has no draft head")
        count = count or head.block_size
        if count > head.block_size:
            raise ValueError(
                f"num_speculative_tokens must be at most {head.block_size}, what the draft head makes, got {count}"
            )
    count = count or DEFAULT_NGRAM_DRAFTS
    room = config.max_backtracking_tokens
    if room is not None and room < count + 1:
        raise ValueError(
            f"max_backtracking_tokens must be at least {count + 1} (num_speculative_tokens {count} + 1), got {room}"
        )
    return count


def draft_bytes(config: EngineConfig, num_drafts: int, vocab_size: int) -> int:
    """What the probabilities that a sequence's drafts were drawn from take on the device, float32 [K, V]; 0 without."""
    speculative = config.speculative_config
    return 4 * num_drafts * vocab_size if speculative is not None and speculative.draws else 0
