"""DraftContext: context rows of the draft head that are written only when drafts are wanted.

Writing them takes time of every step. While no drafts are made (speculation/gate.py), what the rows are made of is
kept for as many steps as the head's window has positions, and written before drafts are made again. Steps that a CUDA
graph replays write theirs themselves. A sequence that is swapped out meanwhile loses what waits, and its drafts are
worse until its window is full again; its tokens are the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.models.caches import Caches
from deepinfer.models.draft_head import DraftHead, Taps


class DraftContext:
    """
    Args:
        head: whose rows these are.
        caches: where they go.
    """

    def __init__(self, head: DraftHead, caches: Caches) -> None:
        self.head = head
        self.caches = caches
        self.is_wanted = True
        self._waiting: deque[Taps] = deque(maxlen=head.config.sliding_window)  # of decode steps, the oldest first

    def add(self, taps: Taps, is_prefill: bool) -> None:
        """A step has run. A prompt's rows are written at once: they are many, and so is what they would be made of."""
        if is_prefill:
            self.forget(taps.state_slots)
        elif self.is_wanted:
            self._catch_up()
        if is_prefill or self.is_wanted:
            self.head.store(taps, self.caches)
        else:
            self._waiting.append(taps)

    def forget(self, slots: Tensor) -> None:
        """Another sequence comes to these state slots, int [N]: rows of the one before must not be written any more."""
        for index, taps in enumerate(self._waiting):
            kept = taps.state_slots.masked_fill(torch.isin(taps.state_slots, slots), 0)  # else to the null slot
            self._waiting[index] = replace(taps, state_slots=kept)

    def _catch_up(self) -> None:
        """Write what waits: drafts are about to be made. Not sooner: the slots have those now whose step this is.

        All rows at once, those of a sequence side by side by position; of one that was drafted and rejected, and then
        came again, only the latter.
        """
        if not self._waiting:
            return
        states, positions, hidden = (
            torch.cat([getattr(taps, name) for taps in self._waiting])
            for name in ("state_slots", "positions", "hidden")
        )
        self._waiting.clear()
        places = states.long() * (int(positions.max()) + 1) + positions
        places, order = places.sort(stable=True)
        comes_again = F.pad(places[:-1] == places[1:], (0, 1))
        states = states[order].masked_fill(comes_again, 0)  # to the null slot
        self.head.store(Taps(hidden[order], positions[order], states), self.caches)
