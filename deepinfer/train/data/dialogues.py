"""All programmatic dialogues by kind. Dialogue i of a kind depends on (kind, seed, i) only."""

import random
from collections.abc import Callable

from deepinfer.train.data.arithmetic import arithmetic
from deepinfer.train.data.dialogue import Dialogue
from deepinfer.train.data.extraction import json_extraction
from deepinfer.train.data.passages import passage_qa
from deepinfer.train.data.smalltalk import copying, memory, persona, small_talk
from deepinfer.train.data.tools import tool_call, tool_dialogue

Generator = Callable[[random.Random, bool], Dialogue]

# kind -> (generator, number of training dialogues)
KINDS: dict[str, tuple[Generator, int]] = {
    "passage": (passage_qa, 34000),
    "json": (json_extraction, 16000),
    "tool": (tool_dialogue, 9000),
    "tool_call": (tool_call, 5000),
    "arithmetic": (arithmetic, 16000),
    "talk": (small_talk, 6000),
    "persona": (persona, 3000),
    "copy": (copying, 9000),
    "memory": (memory, 4000),
}


def make_dialogue(kind: str, seed: int, index: int, held_out: bool = False) -> Dialogue:
    """Dialogue number `index`. With `held_out`, names, tools and sums that training never uses."""
    return KINDS[kind][0](random.Random(f"{kind}-{seed}-{index}-{held_out}"), held_out)
