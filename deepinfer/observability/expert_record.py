"""How many tokens each expert got while somebody records it; without torch, because a server's process knows of it."""

from __future__ import annotations

import numpy as np


class ExpertRecord:
    """Counts of the sampled steps between `start` and `stop`, summed: what an expert balancer is fed with."""

    def __init__(self) -> None:
        self.is_recording = False
        self.num_steps = 0
        self.counts: np.ndarray | None = None  # int64 [layers, experts]

    def start(self) -> None:
        """Forget what was recorded and begin anew."""
        self.is_recording, self.num_steps, self.counts = True, 0, None

    def stop(self) -> None:
        """Count no further; what was counted stays."""
        self.is_recording = False

    def add(self, counts: np.ndarray) -> None:
        """Counts of one sampled step."""
        if self.is_recording:
            self.num_steps += 1
            self.counts = counts.copy() if self.counts is None else self.counts + counts
