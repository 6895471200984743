"""What the engine's draft head says is what its reference says of the same text, wherever the sequence has been.

A head that is asked at a wrong place, or reads what a rejected draft left, only drafts badly: no token of the output
shows it. So this looks at the drafts themselves, while others are verified, of which some are accepted.
"""

from __future__ import annotations

import itertools
from array import array

import pytest
import torch

from deepinfer.models import reference
from deepinfer.models.draft_head import Draft
from deepinfer.models.random_weights import random_weights
from deepinfer.speculation.drafter import Drafts, Round
from deepinfer.speculation.head import HeadDrafter
from deepinfer.speculation.slot_tokens import SlotTokens
from tests.engine.test_speculation import TellTale
from tests.engine.test_speculation_models import (
    CONFIG,
    TOKEN_MAP,
    assert_same,
    drafts_cost_nothing,  # noqa: F401  (a fixture)
    make_engine,
    requests,
    run,
    without_drafts,
)
from tests.models.test_draft_head import check

WEIGHTS = {name: w.double() for name, w in random_weights(CONFIG, seed=0).items()}


class Overseer(TellTale):
    """Hands out other drafts than the head's, which it compares with the reference one time in `every`."""

    def __init__(self, head: HeadDrafter, num_slots: int, texts: list[list[int]], every: int) -> None:
        super().__init__(head.num_drafts, num_slots, texts, 0.8, 1)
        self.head = head
        self.every = every
        self.num_checked = 0

    def expect(self, drafts: bool) -> None:
        self.head.expect(drafts)

    def resumed(self, slot: int, token_ids: array) -> None:
        super().resumed(slot, token_ids)
        self.head.resumed(slot, token_ids)

    def draft(self, state: SlotTokens, round: Round) -> Drafts:
        made = self.head.draft(state, round)
        drafts = Draft(made.tokens, made.scores, None)
        for row, slot in enumerate(round.slots.tolist()):
            if self.random.random() * self.every < 1:
                *processed, latest = self.text[slot]
                trace: dict[str, torch.Tensor] = {}
                reference.forward(WEIGHTS, CONFIG, torch.tensor([processed]), TOKEN_MAP, trace=trace)
                taps = torch.cat([trace[f"layers.{layer}.tap"][0] for layer in CONFIG.dspark_target_layer_ids], -1)
                check(drafts, row, CONFIG, WEIGHTS, taps, latest)
                self.num_checked += 1
        return super().draft(state, round)


@pytest.mark.parametrize(
    ("overlap", "graphs", "mode", "pauses"),
    [(0, 0, "recompute", False), (1, 1, "swap", False), (0, 0, "recompute", True), (1, 1, "recompute", True)],
)
def test_the_head_drafts_behind_what_was_accepted(overlap: int, graphs: int, mode: str, pauses: bool) -> None:
    """Also behind steps for which no drafts were made."""
    engine = make_engine(
        {"method": "dspark"},
        zero_overhead_scheduling=bool(overlap),
        cuda_graphs=bool(graphs),
        preemption_mode=mode,
        num_blocks=16,
    )
    prompts = {str(number): prompt for number, (_, prompt, _) in enumerate(requests(0))}
    texts = [prompts[key] + c.token_ids for key, output in without_drafts().items() for c in output.outputs]
    engine.speculation.drafter.copies = None  # it is the head that is looked at
    overseer = Overseer(engine.speculation.drafter, 5, texts, every=2 if pauses else 6)
    engine.speculation.drafter = overseer
    steps = itertools.count()
    engine.speculation.gate.makes_drafts = lambda size: not pauses or next(steps) % 7 in (0, 5, 6)
    assert_same(run(engine, 0), without_drafts())
    assert engine.scheduler.num_preemptions > 0
    assert overseer.num_accepted > (5 if pauses else 20) and overseer.num_checked > 10
