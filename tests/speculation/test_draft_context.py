"""Context rows that wait are written for the sequence that they are of, or not at all."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from deepinfer.models.draft_head import Taps
from deepinfer.speculation.draft_context import DraftContext
from deepinfer.speculation.head import HeadDrafter
from tests.models.test_draft_head import CONFIG, MODEL, random_taps, stale_caches

LENGTH = 3 * CONFIG.sliding_window
(HIDDEN,) = random_taps([LENGTH], 1)


def rows(slot: int, position: int) -> Taps:
    here = torch.tensor([position])
    return Taps(HIDDEN[here], here, torch.full((1,), slot, dtype=torch.int32))


def start() -> tuple[HeadDrafter, DraftContext, list[Tensor]]:
    caches = stale_caches(MODEL, 3)
    context = DraftContext(MODEL.draft_head, caches)
    return HeadDrafter(MODEL.draft_head, caches, 2, None, context), context, caches.state.draft_rings


def of_slot(rings: list[Tensor], slot: int) -> list[Tensor]:
    return [ring.view(3, -1)[slot].clone() for ring in rings]


def test_what_waits_is_written_with_the_next_step_that_drafts_follow() -> None:
    """However long it waited: as if every row had been written at once."""
    drafter, context, rings = start()
    _, at_once, expected = start()
    drafter.expect(False)
    before = of_slot(rings, 1)
    for position in range(LENGTH - 1):
        context.add(rows(1, position), False)
        at_once.add(rows(1, position), False)
        assert all(map(torch.equal, of_slot(rings, 1), before))
    drafter.expect(True)
    context.add(rows(1, LENGTH - 1), False)
    at_once.add(rows(1, LENGTH - 1), False)
    window = range(LENGTH - CONFIG.sliding_window, LENGTH)
    ring_size = context.caches.state.ring_size
    for ring, other in zip(rings, expected, strict=True):
        places = [position % ring_size for position in window]
        torch.testing.assert_close(ring[1, places], other[1, places], rtol=0, atol=1e-12)


def test_rows_of_one_sequence_never_meet_the_next_one_in_its_slot() -> None:
    """It comes from the host while the step is scheduled for which drafts are wanted again."""
    drafter, context, rings = start()
    drafter.expect(False)
    context.add(rows(1, 5), False)
    brought = of_slot(rings, 1)  # the host's copy of the next sequence, say: its rows lie there now
    drafter.expect(True)
    drafter.resumed(1, array("q"))
    context.add(rows(2, 7), False)
    assert all(map(torch.equal, of_slot(rings, 1), brought))


def test_of_a_rejected_draft_and_the_token_in_its_place_the_latter_stays() -> None:
    """Both waited; sequences of several slots in one step."""
    drafter, context, rings = start()
    _, at_once, expected = start()
    drafter.expect(False)
    for position in (4, 5, 5, 6):  # the second 5 is another token
        here = torch.tensor([position, position])
        hidden = HIDDEN[here] if position != 5 or len(context._waiting) > 1 else HIDDEN[here] + 1.0
        taps = Taps(hidden, here, torch.tensor([2, 1], dtype=torch.int32))
        context.add(taps, False)
        at_once.add(taps, False)
    drafter.expect(True)
    last = Taps(HIDDEN[7:8], torch.tensor([7]), torch.tensor([1], dtype=torch.int32))
    context.add(last, False)
    at_once.add(last, False)
    for ring, other in zip(rings, expected, strict=True):
        for slot in (1, 2):
            torch.testing.assert_close(ring[slot, 4:7], other[slot, 4:7], rtol=0, atol=1e-12)
