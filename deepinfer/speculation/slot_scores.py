"""SlotScores: what the host has read of the drafts in each state slot, in arrays that a step reads with one gather."""

from __future__ import annotations

import numpy as np


class SlotScores:
    """Scores of the latest drafts that were read, by state slot.

    Args:
        num_slots: state slots, null slot included.
    """

    def __init__(self, num_slots: int) -> None:
        self._scores: np.ndarray | None = None  # float64 [slots, columns] of Drafts.scores, once there are any
        self._known = np.zeros(num_slots, bool)

    def set(self, slots: np.ndarray, scores: np.ndarray | None) -> None:
        """Scores [S, columns] of the drafts in slots int64 [S]; None: no drafts were made for these."""
        if scores is None:
            self._known[slots] = False
            return
        if self._scores is None:
            self._scores = np.zeros((len(self._known), scores.shape[1]))
        self._scores[slots] = scores
        self._known[slots] = True

    def forget(self, slot: int) -> None:
        """Another sequence comes."""
        self._known[slot] = False

    def of(self, slots: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """Scores [S, columns], which mean nothing where they are not known (bool [S]); None: nothing is known."""
        known = self._known[slots]
        return (self._scores[slots] if self._scores is not None and known.any() else None), known
