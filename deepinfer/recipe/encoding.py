"""Prompt -> token IDs: control tokens by role where the renderer put them, everything else as ordinary text."""

from deepinfer.recipe.control_tokens import GROUNDING_ROLES
from deepinfer.recipe.prompt import Prompt
from deepinfer.recipe.tokenizer import Tokenizer


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Token IDs of a prompt.

    The text between control tokens is encoded without the added vocabulary and never merges across them, so the number
    of control tokens in the result is exactly that of ``prompt.control_ranges`` (image regions apart, where the
    tokenizer has no tokens for them).  Raises ValueError when the tokenizer lacks a control token that the prompt uses.
    """
    spans = [
        (span, tokenizer.control_id(role))
        for span, role in zip(prompt.control_ranges, prompt.control_roles, strict=True)
        if role in tokenizer.control_ids or role not in GROUNDING_ROLES  # a model without them reads them as text
    ]
    controls = [token_id for _, token_id in spans]
    bounds = [0, *(edge for span, _ in spans for edge in span), len(prompt.text)]
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
