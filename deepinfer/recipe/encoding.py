"""Prompt -> token IDs: control tokens by role where the renderer put them, everything else as ordinary text."""

from deepinfer.recipe.prompt import Prompt
from deepinfer.recipe.tokenizer import Tokenizer


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Token IDs of a prompt.

    The text between control tokens is encoded without the added vocabulary and never merges across them, so the number
    of control tokens in the result is exactly ``len(prompt.control_ranges)``.  Raises ValueError when the tokenizer
    lacks a control token that the prompt uses.
    """
    controls = [tokenizer.control_id(role) for role in prompt.control_roles]
    bounds = [0, *(edge for span in prompt.control_ranges for edge in span), len(prompt.text)]
    segments = [prompt.text[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    filled = [segment for segment in segments if segment]
    encoded = iter(tokenizer.encode_texts(filled))
    token_ids: list[int] = []
    for i, segment in enumerate(segments):
        if segment:
            token_ids.extend(next(encoded))
        if i < len(controls):
            token_ids.append(controls[i])
    return token_ids
