"""Held-out prompts for evaluation: other seeds, and names, tools and sums that training never uses."""

from collections.abc import Iterator

from deepinfer.recipe.tokenizer import Tokenizer
from deepinfer.train.data.dialogue import Dialogue
from deepinfer.train.data.dialogues import make_dialogue

SEED = 2
COUNTS = {"passage": 200, "tool_call": 200, "arithmetic": 100, "json": 100}


def evaluation_dialogues(held_out: bool = True) -> Iterator[Dialogue]:
    """The fixed evaluation set. `held_out=False` gives the same kinds over the training names, tools and sums."""
    for kind, count in COUNTS.items():
        for i in range(count):
            yield make_dialogue(kind, SEED, i, held_out)


def evaluation_records(tokenizer: Tokenizer, held_out: bool = True) -> Iterator[dict[str, object]]:
    """JSON-ready records: kind, thinking, prompt_ids, completion_ids, expected.

    `expected` is the key text of the answer (passage), the number (arithmetic), the JSON object (json), or a JSON list
    of {"name", "arguments"} (tool).
    """
    for dialogue in evaluation_dialogues(held_out):
        prompt, completion = dialogue.token_ids(tokenizer)
        yield {
            "kind": dialogue.kind,
            "thinking": dialogue.thinking,
            "prompt_ids": prompt,
            "completion_ids": completion,
            "expected": dialogue.expected,
        }
