"""SlotTokens: what the device knows of each sequence before the host does, by state slot.

A step is launched before the tokens of the step in front of it are read; its inputs are taken from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.models.inputs import ModelInputs


@dataclass(frozen=True)
class SlotTokens:
    """`tokens` int64 [slots, 1 + K]: the token sampled last and the drafts after it, below 0 where there is none.
    `lengths` int64 [slots]: tokens of the sequence, the one sampled last included; kept only if K > 0."""

    tokens: Tensor
    lengths: Tensor

    @classmethod
    def allocate(cls, num_slots: int, num_drafts: int, device: torch.device | str) -> SlotTokens:
        """`num_slots` includes the null slot."""
        tokens = torch.zeros(num_slots, 1 + num_drafts, dtype=torch.int64, device=device)
        return cls(tokens, torch.ones(num_slots, dtype=torch.int64, device=device))

    @property
    def num_drafts(self) -> int:
        """K, most drafts of a sequence."""
        return self.tokens.shape[1] - 1

    def fill(self, inputs: ModelInputs) -> ModelInputs:
        """Decode inputs in which a token id -1 - j stands for column j of the row's slot, and that also for its
        position and context if K > 0. No launch depends on values."""
        token_ids, slots = inputs.token_ids, inputs.state_slots.long()
        if self.num_drafts == 0:
            latest = self.tokens[:, 0][slots]
            return replace(inputs, token_ids=torch.where(token_ids < 0, latest, token_ids))
        is_pending, column = token_ids < 0, (-1 - token_ids).clamp_min(0)
        # Where there is no draft any token does: its row is not accepted.
        known = self.tokens.view(-1).index_select(0, slots * self.tokens.shape[1] + column).clamp_min(0)
        contexts = torch.where(is_pending, self.lengths.index_select(0, slots) + column, inputs.context_lens)
        return replace(
            inputs,
            token_ids=torch.where(is_pending, known, token_ids),
            positions=contexts - 1,
            context_lens=contexts.to(torch.int32),
        )
