"""HeadDrafter: the checkpoint's own draft head makes the drafts, and says how likely each is to be accepted."""

from __future__ import annotations

from array import array

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels import ops
from deepinfer.models.caches import Caches
from deepinfer.models.draft_head import DraftHead, DraftSampling
from deepinfer.models.inputs import ModelInputs
from deepinfer.sampling.sampler import DrawParameters
from deepinfer.speculation.draft_context import DraftContext
from deepinfer.speculation.drafter import Drafts, DraftSlots, Round
from deepinfer.speculation.slot_tokens import SlotTokens

DRAFTS = 0x1F83D9ABFB41BD6B  # which random numbers of a seed draw drafts


class HeadDrafter:
    """A Drafter. The context rows of every step are stored by whoever runs the model, with the step or in `context`.

    Args:
        probabilities: float32 [slots, K, V], which gets what the drafts of each slot are drawn from; None: they are the
            most likely tokens.
        context: which rows of steps that are not replayed are written later; None: none.
    """

    learns = False  # the confidences were calibrated when the head was trained

    def __init__(
        self,
        head: DraftHead,
        caches: Caches,
        num_drafts: int,
        probabilities: Tensor | None = None,
        context: DraftContext | None = None,
    ) -> None:
        self.probabilities = probabilities
        self.head = head
        self.caches = caches
        self.num_drafts = num_drafts
        self.context = context
        self.run: DraftSlots = self.draft_slots

    def expect(self, drafts: bool) -> None:
        if self.context is not None:
            self.context.is_wanted = drafts

    def prefilled(self, inputs: ModelInputs) -> None:
        """Nothing to do: the context rows are in the caches."""

    def resumed(self, slot: int, token_ids: array) -> None:
        """The rows of its tokens came with its state."""
        if self.context is not None:
            self.context.forget(torch.tensor([slot], device=self.head.device))

    def chosen(self, state: SlotTokens, round: Round) -> None:
        """Nothing to do: rows behind the last token are overwritten."""

    def draft(self, state: SlotTokens, round: Round) -> Drafts:
        return self.run(state, round.slots, round.drawing)

    @torch.inference_mode()
    def draft_slots(self, state: SlotTokens, slots: Tensor, drawing: DrawParameters | None = None) -> Drafts:
        """Drafts of the sequences in these slots, int64 [S]; the latest token of each is not in the caches yet."""
        last = (state.lengths[slots] - 2).clamp_min(0)  # the null slot has no tokens
        sampling = None
        if drawing is not None:
            # A sequence is drafted for at most once at each length, so no random number serves two drafts.
            counters = state.lengths[slots] * self.head.block_size
            sampling = DraftSampling(*drawing[:5], drawing.seeds ^ DRAFTS, counters)
        draft = self.head.draft(last, state.tokens[slots, 0], slots.to(torch.int32), self.caches, sampling)
        if drawing is not None and draft.logits is not None and self.probabilities is not None:
            logits = draft.logits[:, : self.num_drafts].flatten(0, 1)
            rows = [t.repeat_interleave(self.num_drafts) for t in (drawing.temperature, drawing.num_candidates)]
            rows += [t.repeat_interleave(self.num_drafts) for t in (drawing.top_p, drawing.min_p)]
            drawn_from = ops.token_probabilities(logits, *rows, True)
            self.probabilities[slots] = drawn_from.view(len(slots), self.num_drafts, -1)
        return Drafts(draft.tokens[:, : self.num_drafts], draft.confidences[:, : self.num_drafts])

    def survival(self, scores: np.ndarray) -> np.ndarray:
        return np.cumprod(scores, axis=1)

    def learn(self, scores: np.ndarray, num_verified: np.ndarray, num_accepted: np.ndarray) -> None:
        """Nothing to do."""
