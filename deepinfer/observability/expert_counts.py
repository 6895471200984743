"""How many tokens each expert got: sampled from a step now and then, without waiting for the device.

A model keeps the experts that its latest step chose, which costs nothing. When a sample is due they are counted on the
device, behind the step; the counts are read by a later step, once they have arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor


class ExpertCounts:
    """Samples of one model.

    Args:
        interval: seconds between samples.
        clock: seconds, monotonic.
    """

    def __init__(self, interval: float = 0.25, clock: Callable[[], float] = time.monotonic) -> None:
        self.interval = interval
        self._clock = clock
        self._due = clock()
        self._counts: Tensor | None = None  # on its way to the host
        self._arrived: torch.cuda.Event | None = None  # None: it is there

    def offer(self, chosen: Sequence[Tensor], num_rows: int, num_layers: int, num_experts: int) -> None:
        """Call behind every launched step. Counts it if a sample is due and the last one has been taken.

        Args:
            chosen: int [N, k] experts of each row, for every layer; N >= num_rows, rows behind are padding. A step
                whose layers see different rows, or do not all run (YoCo truncation), is not counted.
            num_rows: rows of the step.
            num_layers: of the model.
            num_experts: routed experts of a layer.
        """
        now = self._clock()
        if self._counts is not None or now < self._due:
            return
        if len(chosen) != num_layers or len({len(rows) for rows in chosen}) != 1:
            return
        self._due = now + self.interval
        picked = torch.stack(list(chosen))[:, :num_rows].flatten(1).long()  # [layers, num_rows * k]
        counts = torch.zeros(len(picked), num_experts, dtype=torch.int64, device=picked.device)
        counts.scatter_add_(1, picked, torch.ones_like(picked))
        self._arrived = None
        if counts.is_cuda:
            host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            counts = host.copy_(counts, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self._counts = counts

    def take(self) -> np.ndarray | None:
        """int64 [layers, experts] of a sampled step, once each; None if none has arrived. Never waits."""
        if self._counts is None or (self._arrived is not None and not self._arrived.query()):
            return None
        counts, self._counts = self._counts, None
        return counts.numpy()
