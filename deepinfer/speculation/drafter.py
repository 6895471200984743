"""What drafts the next tokens of sequences: the interface, and which one an engine's settings ask for."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from deepinfer.models.inputs import ModelInputs
from deepinfer.sampling.sampler import DrawParameters
from deepinfer.speculation.slot_tokens import SlotTokens


@dataclass(slots=True)
class Round:
    """S sequences whose next tokens have just been chosen; all on the device, and the host does not wait for it."""

    slots: Tensor  # int64 [S] state slots
    tokens: Tensor  # int64 [S, at most 1 + K] chosen now, of which the first `accepted` + 1 count
    accepted: Tensor  # int64 [S] drafts accepted
    longest: int  # tokens of the longest sequence, at most
    drawing: DrawParameters | None  # how the sequences draw tokens, for drafts that are drawn like them


@dataclass(slots=True)
class Drafts:
    """What may come next, on the device. What drafts were drawn from is in `Drafter.probabilities`."""

    tokens: Tensor  # int64 [S, K], kernels.reference.speculation.NO_DRAFT where there is none
    scores: Tensor  # [S, columns] what the drafter knows of their chances; `survival` of the same drafter reads it


class DraftSlots(Protocol):
    """Makes drafts of the sequences in slots int64 [S]; `drawing`: how they are drawn, None: the most likely tokens."""

    def __call__(self, state: SlotTokens, slots: Tensor, drawing: DrawParameters | None = None) -> Drafts: ...


class Drafter(Protocol):
    """Called in the order of the steps, and everything it does is in stream order."""

    num_drafts: int  # K
    # float32 [slots, K, V]: what the latest drafts of each slot were drawn from, for rejection sampling; None: they are
    # not drawn, and accepted if the target agrees.
    probabilities: Tensor | None
    learns: bool  # whether `learn` has to be called

    def expect(self, drafts: bool) -> None:
        """Whether drafts will be made behind the next decode step; called before it is launched."""
        ...

    def prefilled(self, inputs: ModelInputs) -> None:
        """A prefill step with these inputs has been launched."""
        ...

    def resumed(self, slot: int, token_ids: array) -> None:
        """A sequence goes on in `slot` that was not prefilled here."""
        ...

    def chosen(self, state: SlotTokens, round: Round) -> None:
        """Tokens have been chosen; `state` is already past them. `draft` may follow."""
        ...

    def draft(self, state: SlotTokens, round: Round) -> Drafts:
        """Drafts for the sequences of the round."""
        ...

    def survival(self, scores: np.ndarray) -> np.ndarray:
        """Chances [S, K] that draft i and all before it are accepted, not rising, from S rows of Drafts.scores."""
        ...

    def learn(self, scores: np.ndarray, num_verified: np.ndarray, num_accepted: np.ndarray) -> None:
        """What became of drafts with scores [S, columns], of which num_verified int [S] were verified, at least 1."""
        ...
