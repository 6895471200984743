"""Beside a draft head: which sequences get copied drafts, by a count of what each of the two is expected to bring."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from deepinfer.config.speculative import SpeculativeConfig
from deepinfer.speculation.drafter import Drafts, Round
from deepinfer.speculation.head import LONG_MATCH, HeadDrafter
from deepinfer.speculation.ngram import NgramDrafter
from deepinfer.speculation.slot_tokens import SlotTokens

K, OF_HEAD = 4, 99  # drafts; the token that the head says always


def make_drafter(confidence: float, num_slots: int) -> tuple[HeadDrafter, list[int]]:
    """A drafter whose head says one token, and how many sequences it was asked for each time."""
    asked: list[int] = []

    def run(state, slots, drawing=None) -> Drafts:
        asked.append(len(slots))
        return Drafts(torch.full((len(slots), K), OF_HEAD), torch.full((len(slots), K), confidence))

    config = SpeculativeConfig(method="ngram", prompt_lookup_min=2, prompt_lookup_max=LONG_MATCH)
    drafter = HeadDrafter(None, None, K, copies=NgramDrafter(config, K, num_slots, 200, "cpu"))  # type: ignore[arg-type]
    drafter.run = run
    return drafter, asked


def ask(drafter: HeadDrafter, texts: list[list[int]]) -> Drafts:
    state = SlotTokens.allocate(len(texts) + 1, K, "cpu")
    for slot, text in enumerate(texts, 1):
        drafter.resumed(slot, array("i", text))
        state.lengths[slot] = len(text)
    slots = torch.arange(1, len(texts) + 1)
    round = Round(slots, torch.tensor([[text[-1]] for text in texts]), torch.zeros_like(slots), 200, None)
    drafter.chosen(state, round)
    return drafter.draft(state, round)


def longest_match(text: list[int]) -> tuple[int, list[int]]:
    """(tokens, what came behind the latest longest one) of matches of the text's end, of 2 to LONG_MATCH tokens."""
    for length in range(LONG_MATCH, 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                behind = text[end:]
                return length, [behind[i % len(behind)] for i in range(K)]
    return 0, []


@pytest.mark.parametrize("confidence", [0.0, 0.4, 0.7, 0.85, 0.99])
def test_the_drafts_of_which_more_are_expected_to_be_accepted(confidence: float):
    generator = random.Random(3)
    drafter, _ = make_drafter(confidence, 65)
    texts = []
    for number in range(64):
        loop = [generator.randrange(90) for _ in range(20)]
        texts.append([*loop, 95, *loop[: number % 19]] if number % 4 else [generator.randrange(5) for _ in range(30)])
    texts = [text + [text[-1]] if number % 7 == 0 else text for number, text in enumerate(texts)]
    drafts = ask(drafter, texts)
    by_head = sum(confidence**k for k in range(1, K + 1))
    copied = 0
    for text, tokens, scores in zip(texts, drafts.tokens.tolist(), drafts.scores.tolist(), strict=True):
        length, behind = longest_match(text)
        # what has gone on for m tokens ends at the next one once in m
        if length and sum((length - 1) / (length - 1 + k) for k in range(1, K + 1)) > by_head:
            copied += 1
            assert tokens == behind
            assert scores == pytest.approx([1 - 1 / (length + k) for k in range(K)])
        else:
            assert tokens == [OF_HEAD] * K and scores == pytest.approx([confidence] * K)
    assert copied == 0 if confidence == 0.99 else 5 < copied < 64


def test_the_head_is_not_asked_where_all_sequences_repeat_themselves():
    drafter, asked = make_drafter(0.999, 3)
    loop = list(range(20, 50))
    drafts = ask(drafter, [[*loop, *loop[:LONG_MATCH]], [7] * 40])
    assert not asked
    assert drafts.tokens.tolist() == [loop[LONG_MATCH : LONG_MATCH + K], [7] * K]
    ask(drafter, [[*loop, *loop[:LONG_MATCH]], loop])
    assert asked == [2]
