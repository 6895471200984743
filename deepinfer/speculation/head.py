"""HeadDrafter: the checkpoint's own draft head makes the drafts, and says how likely each is to be accepted."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.models.caches import Caches
from deepinfer.models.draft_head import DraftHead
from deepinfer.models.inputs import ModelInputs
from deepinfer.speculation.drafter import Drafts, Round
from deepinfer.speculation.slot_tokens import SlotTokens


class HeadDrafter:
    """A Drafter. The context rows of every step are stored by whoever runs the model, with the step."""

    def __init__(self, head: DraftHead, caches: Caches, num_drafts: int) -> None:
        self.head = head
        self.caches = caches
        self.num_drafts = num_drafts
        self.run: Callable[[SlotTokens, Tensor], Drafts] = self.draft_slots

    def prefilled(self, inputs: ModelInputs) -> None:
        """Nothing to do: the context rows are in the caches."""

    def resumed(self, slot: int, token_ids: array) -> None:
        """Nothing to do: they came with the sequence's state."""

    def chosen(self, state: SlotTokens, round: Round) -> None:
        """Nothing to do: rows behind the last token are overwritten."""

    def draft(self, state: SlotTokens, round: Round) -> Drafts:
        return self.run(state, round.slots)

    @torch.inference_mode()
    def draft_slots(self, state: SlotTokens, slots: Tensor) -> Drafts:
        """Drafts of the sequences in these slots, int64 [S]; the latest token of each is not in the caches yet."""
        last = (state.lengths[slots] - 2).clamp_min(0)  # the null slot has no tokens
        draft = self.head.draft(last, state.tokens[slots, 0], slots.to(torch.int32), self.caches)
        return Drafts(draft.tokens[:, : self.num_drafts], draft.confidences[:, : self.num_drafts])

    def survival(self, scores: list[float]) -> list[float]:
        result, chance = [], 1.0
        for confidence in scores:
            chance *= confidence
            result.append(chance)
        return result

    def learn(self, scores: list[float], num_verified: int, num_accepted: int) -> None:
        """Nothing to do: the confidences were calibrated when the head was trained."""
