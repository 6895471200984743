"""DraftGraphs: the second runner. Making drafts, captured once for each size of a ladder and replayed ever after.

A draft head is small, and launching its kernels one by one costs more than running them. Its inputs are where the
sequences are (state slots) and, if it draws, how; everything else it reads on the device (speculation/slot_tokens.py).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left

import numpy as np
import torch
from torch import Tensor

from deepinfer.engine.cuda_graph import batch_sizes
from deepinfer.engine.graph_pool import CaptureCost, GraphPool
from deepinfer.sampling.sampler import DrawParameters
from deepinfer.speculation.drafter import Drafts, DraftSlots
from deepinfer.speculation.slot_tokens import SlotTokens

logger = logging.getLogger(__name__)


class DraftGraphs:
    """Called like `draft`, whose results it gives; they stay until the next call.

    Args:
        draft: state, slots int64 [S], how to draw -> Drafts; no shape and no launch may depend on values.
        state: the one that is always given.
        interval: distance between captured sizes.
        vocab_size: of the drafts, if they are drawn; None: they are not.
    """

    def __init__(self, draft: DraftSlots, state: SlotTokens, interval: int, vocab_size: int | None = None) -> None:
        self.draft = draft
        self.state = state
        self.sizes = batch_sizes(len(state.lengths) - 1, interval)
        self.cost = CaptureCost()
        self._slots = torch.zeros(self.sizes[-1], dtype=torch.int64, device=state.lengths.device)
        self._drawing = None if vocab_size is None else greedy_drawing(self.sizes[-1], vocab_size, self._slots.device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._drafts: Drafts | None = None

    def __call__(self, state: SlotTokens, slots: Tensor, drawing: DrawParameters | None = None) -> Drafts:
        assert state is self.state and self._drafts is not None
        if drawing is not None and drawing.most_candidates:  # so many are selected, which no graph can know
            return self.draft(state, slots, drawing)
        count = len(slots)
        index = bisect_left(self.sizes, count)
        self._slots[:count] = slots
        self._slots[count : self.sizes[index]] = 0  # the null slot
        if drawing is not None:
            assert self._drawing is not None
            for kept, given in zip(first_rows(self._drawing, count), drawing, strict=True):
                if isinstance(kept, Tensor) and isinstance(given, Tensor):
                    kept.copy_(given)
        self._graphs[index].replay()
        return Drafts(self._drafts.tokens[:count], self._drafts.scores[:count])

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, the largest first. Writes to the null slot only."""
        with GraphPool.measured(self._slots.device, self.cost) as pool:
            for size in reversed(self.sizes):
                self._graphs.insert(0, self._capture(size, pool))
        logger.info("captured %d draft graphs of up to %d sequences in %s", len(self.sizes), self.sizes[-1], self.cost)

    def _capture(self, size: int, pool: GraphPool) -> torch.cuda.CUDAGraph:
        slots = self._slots[:size]
        drawing = None if self._drawing is None else first_rows(self._drawing, size)
        drafts = pool.warm_up(lambda: self.draft(self.state, slots, drawing))
        if self._drafts is None:
            self._drafts = Drafts(torch.empty_like(drafts.tokens), torch.empty_like(drafts.scores))
        graph = torch.cuda.CUDAGraph()
        with pool.capture(graph):
            drafts = self.draft(self.state, slots, drawing)
            self._drafts.tokens[:size] = drafts.tokens
            self._drafts.scores[:size] = drafts.scores
        return graph


def greedy_drawing(num_rows: int, vocab_size: int, device: torch.device) -> DrawParameters:
    """Parameters of rows that take the most likely token, in tensors of their own."""
    numbers = torch.zeros(num_rows, dtype=torch.int64, device=device)
    shares = numbers.double()
    return DrawParameters(shares, numbers + vocab_size, 0, shares + 1, shares.clone(), numbers, numbers.clone())


def first_rows(drawing: DrawParameters, count: int) -> DrawParameters:
    """The parameters of the first rows, in the same memory."""
    temperature, num_candidates, most_candidates, *others = drawing
    top_p, min_p, seeds, counters = (tensor[:count] for tensor in others)
    return DrawParameters(temperature[:count], num_candidates[:count], most_candidates, top_p, min_p, seeds, counters)


def draft_times(draft: DraftSlots, state: SlotTokens, repeats: int = 5) -> np.ndarray:
    """Milliseconds [slots] of making drafts for 0, 1, ... sequences: measured at powers of two, linear in between.

    Writes to the null slot only.
    """
    most, device = len(state.lengths) - 1, state.lengths.device
    sizes = batch_sizes(most, 1 << most.bit_length())
    times = []
    for size in sizes:
        slots = torch.zeros(size, dtype=torch.int64, device=device)
        draft(state, slots)
        times.append(min(_timed(draft, state, slots) for _ in range(repeats)))
    undisturbed = np.minimum.accumulate(times[::-1])[::-1]  # more sequences never take less time
    return np.interp(np.arange(most + 1), sizes, undisturbed)


def _timed(draft: DraftSlots, state: SlotTokens, slots: Tensor) -> float:
    if not slots.is_cuda:
        begin = time.thread_time()
        draft(state, slots)
        return (time.thread_time() - begin) * 1e3
    torch.cuda.synchronize(slots.device)
    begin = time.perf_counter()
    for _ in range(10):  # one behind the other, as they are behind a step: without the time of a first launch
        draft(state, slots)
    torch.cuda.synchronize(slots.device)
    return (time.perf_counter() - begin) * 1e2
