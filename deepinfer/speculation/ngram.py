"""NgramDrafter: prompt lookup. What followed the last tokens of a sequence the last time is likely to follow again.

The idea is A. Saxena's "Prompt Lookup Decoding" (2023). It needs no weights, only the sequence's own text. That is kept
on the device, so that a step can be drafted before the host has read the one in front of it.
"""

from __future__ import annotations

from array import array

import numpy as np
import torch
from torch import Tensor

from deepinfer.config.speculative import SpeculativeConfig
from deepinfer.kernels import ops
from deepinfer.models.inputs import ModelInputs
from deepinfer.speculation.acceptance import AcceptanceRates
from deepinfer.speculation.drafter import Drafts, Round
from deepinfer.speculation.slot_tokens import SlotTokens


class NgramDrafter:
    """A Drafter.

    Args:
        num_slots: state slots, the null slot included.
        max_model_len: most tokens of a sequence.
    """

    probabilities: Tensor | None = None
    learns = True

    def __init__(
        self,
        config: SpeculativeConfig,
        num_drafts: int,
        num_slots: int,
        max_model_len: int,
        device: torch.device | str,
    ) -> None:
        self.num_drafts = num_drafts
        self.min_match, self.max_match = config.prompt_lookup_min, config.prompt_lookup_max
        # Also what is behind the last accepted token may be written.
        self.history = torch.zeros(num_slots, max_model_len + num_drafts + 2, dtype=torch.int32, device=device)
        self.rates = AcceptanceRates(self.max_match + 1, num_drafts)

    def expect(self, drafts: bool) -> None:
        """Nothing to do."""

    def prefilled(self, inputs: ModelInputs) -> None:
        counts = inputs.query_start.diff()
        slots = torch.repeat_interleave(inputs.state_slots.long(), counts, output_size=len(inputs.positions))
        self.history[slots, inputs.positions] = inputs.token_ids.to(torch.int32)

    def resumed(self, slot: int, token_ids: array) -> None:
        tokens = torch.tensor(token_ids, dtype=torch.int32)
        if self.history.is_cuda:
            tokens = tokens.pin_memory()
        self.history[slot, : len(tokens)].copy_(tokens, non_blocking=True)

    def chosen(self, state: SlotTokens, round: Round) -> None:
        lengths = state.lengths[round.slots]
        if round.tokens.shape[1] == 1:
            self.history[round.slots, lengths - 1] = round.tokens[:, 0].to(torch.int32)
            return
        start = (lengths - 1 - round.accepted).unsqueeze(1)
        places = start + torch.arange(round.tokens.shape[1], device=lengths.device)
        self.history[round.slots.unsqueeze(1), places] = round.tokens.to(torch.int32)

    def draft(self, state: SlotTokens, round: Round) -> Drafts:
        tokens, match = ops.lookup_drafts(
            self.history, round.slots, state.lengths, round.longest, self.num_drafts, self.min_match, self.max_match
        )
        return Drafts(tokens, match.unsqueeze(1))

    def survival(self, scores: np.ndarray) -> np.ndarray:
        by_match = [[0.0] * self.num_drafts] + [self.rates.survival(match) for match in range(1, self.max_match + 1)]
        return np.array(by_match)[scores[:, 0].astype(np.int64)]

    def learn(self, scores: np.ndarray, num_verified: np.ndarray, num_accepted: np.ndarray) -> None:
        matches = scores[:, 0].astype(np.int64).tolist()
        for match, verified, accepted in zip(matches, num_verified.tolist(), num_accepted.tolist(), strict=True):
            if match:
                self.rates.observe(match, verified, accepted)
