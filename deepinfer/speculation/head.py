"""HeadDrafter: the checkpoint's own draft head makes the drafts, and says how likely each is to be accepted.

Where a sequence repeats what it has said before, copying often goes on better than the head does: prompt lookup drafts
beside it, and of each sequence the drafts are taken of which more are expected to be accepted.
"""

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
from deepinfer.speculation.ngram import NgramDrafter
from deepinfer.speculation.slot_tokens import SlotTokens

DRAFTS = 0x1F83D9ABFB41BD6B  # which random numbers of a seed draw drafts
LONG_MATCH = 16  # tokens of a match behind which the head is not asked


class HeadDrafter:
    """A Drafter. The context rows of every step are stored by whoever runs the model, with the step or in `context`.

    Args:
        probabilities: float32 [slots, K, V], which gets what the drafts of each slot are drawn from; None: they are the
            most likely tokens.
        context: which rows of steps that are not replayed are written later; None: none.
        copies: prompt lookup beside the head, of matches of up to LONG_MATCH tokens; None: the head drafts alone.
    """

    learns = False  # the confidences were calibrated when the head was trained

    def __init__(
        self,
        head: DraftHead,
        caches: Caches,
        num_drafts: int,
        probabilities: Tensor | None = None,
        context: DraftContext | None = None,
        copies: NgramDrafter | None = None,
    ) -> None:
        self.probabilities = probabilities
        self.head = head
        self.caches = caches
        self.num_drafts = num_drafts
        self.context = context
        self.copies = copies
        self._chances = copy_chances(LONG_MATCH, num_drafts)
        self._lengths = self._chances.cumprod(1).sum(1)
        self.run: DraftSlots = self.draft_slots

    def expect(self, drafts: bool) -> None:
        if self.context is not None:
            self.context.is_wanted = drafts

    def prefilled(self, inputs: ModelInputs) -> None:
        """The context rows are in the caches."""
        if self.copies is not None:
            self.copies.prefilled(inputs)

    def resumed(self, slot: int, token_ids: array) -> None:
        """The rows of its tokens came with its state."""
        if self.context is not None:
            self.context.forget(torch.tensor([slot], device=self.head.device))
        if self.copies is not None:
            self.copies.resumed(slot, token_ids)

    def chosen(self, state: SlotTokens, round: Round) -> None:
        """Rows behind the last token are overwritten."""
        if self.copies is not None:
            self.copies.chosen(state, round)

    def draft(self, state: SlotTokens, round: Round) -> Drafts:
        if self.copies is None:
            return self.run(state, round.slots, round.drawing)
        copied = self.copies.draft(state, round)
        match = copied.scores[:, 0]
        if int(match.min()) >= LONG_MATCH:
            return Drafts(copied.tokens, self._chances[match])
        drafts = self.run(state, round.slots, round.drawing)
        if not match.any():
            return drafts
        is_copied = (self._lengths[match] > drafts.scores.cumprod(1).sum(1)).unsqueeze(1)
        tokens = torch.where(is_copied, copied.tokens, drafts.tokens)
        return Drafts(tokens, torch.where(is_copied, self._chances[match], drafts.scores))

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


def copy_chances(longest: int, num_drafts: int) -> Tensor:
    """float32 [longest + 1, K]: by tokens of the match, that a copied draft is accepted if all before it are.

    What has gone on for m tokens ends at the next one once in m: so do nano's greedy answers repeat themselves.
    """
    length = torch.arange(longest + 1).clamp_min(1).unsqueeze(1) + torch.arange(num_drafts)
    return 1 - 1 / length.to(torch.float32)
