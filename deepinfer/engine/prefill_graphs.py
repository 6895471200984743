"""PrefillGraphs: full chunks of one long prompt, captured as CUDA graphs.

A prefill step is hundreds of launches, and launching them can take the host longer than the device needs to run them.
The shapes of most steps vary too much to be captured; those of a long prompt's chunks do not: one sequence,
`prefill_chunk_size` tokens, and in front of them nothing or at least a whole window. Every other step stays eager.
Without a capture (on a CPU) the padded chunks run eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deepinfer.engine.graph_pool import CaptureCost, GraphPool
from deepinfer.models.inputs import HostLengths, ModelInputs
from deepinfer.models.layers.step import POOLED_RATIO

logger = logging.getLogger(__name__)

MOST_BLOCKS = 256  # block-table columns of the widest captured chunk; work on a table grows with its width
WIDTH_FACTOR = 4  # between the widths


@dataclass(frozen=True)
class ChunkShape:
    """What the shapes inside a chunk's step depend on, beside its number of tokens."""

    blocks: int  # columns of the block table
    is_first: bool  # nothing is in front of it; else a whole window
    kept: int  # its last tokens that run the decoder layers (YoCo truncation)


def table_widths(max_blocks: int) -> list[int]:
    """Columns of the captured block tables."""
    widths = [min(max_blocks, MOST_BLOCKS)]
    while widths[0] > 2 * WIDTH_FACTOR:
        widths.insert(0, -(-widths[0] // WIDTH_FACTOR))
    return widths


class PrefillGraphs:
    """Runs the chunks that have a captured shape.

    Args:
        forward: ModelInputs of a prefill step -> logits [R, vocab] and what else it leaves that a caller reads; no
            shape may depend on other values than the host's lengths.
        chunk: tokens of a chunk.
        window: tokens of the sliding window.
        max_blocks: columns of the widest block table.
        block_size: tokens of a block.
        keep_tokens: tokens of a prompt that run the decoder layers; None: all (no truncation).
        device: of the inputs.
    """

    def __init__(
        self,
        forward: Callable[[ModelInputs], tuple[Tensor, list[Tensor]]],
        chunk: int,
        window: int,
        max_blocks: int,
        block_size: int,
        keep_tokens: int | None,
        device: torch.device | str,
    ) -> None:
        self.forward = forward
        self.chunk, self.window = chunk, window
        self.widths = table_widths(max_blocks)
        kept = [chunk] if keep_tokens is None else [0, keep_tokens]
        self.shapes = [
            ChunkShape(blocks, is_first, count)
            for blocks in self.widths
            for is_first in (True, False)
            for count in kept
            if count <= chunk
            and chunk % POOLED_RATIO == 0  # a group that a chunk leaves open changes the next one
            and blocks * block_size >= self._start(is_first) + chunk
        ]
        self.cost = CaptureCost()
        self._replays: dict[ChunkShape, torch.cuda.CUDAGraph] = {}
        self._others: dict[ChunkShape, list[Tensor]] = {}
        self._logits: Tensor | None = None  # [1, vocab], all graphs write there

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._tokens, self._positions = zeros(chunk, dtype=torch.int64), zeros(chunk, dtype=torch.int64)
        self._context, self._table, self._slot = zeros(1), zeros(self.widths[-1]), zeros(1)
        self._keep_from = zeros(1)
        self._query_start = torch.tensor([0, chunk], dtype=torch.int32, device=device)
        self._last_row = torch.tensor([chunk - 1], device=device)

    def _start(self, is_first: bool) -> int:
        """Tokens in front of the chunk, for a capture; later ones have any number that is at least a window."""
        return 0 if is_first else self.window + self.window % POOLED_RATIO

    def shape_of(self, inputs: ModelInputs) -> ChunkShape | None:
        """The shape of a prefill step; None if it is none of `shapes`."""
        lengths = inputs.lengths
        if lengths is None or len(lengths.count) != 1 or lengths.count[0] != self.chunk:
            return None
        start, blocks, kept = int(lengths.start[0]), inputs.block_tables.shape[1], int(lengths.kept[0])
        if blocks > self.widths[-1] or (0 < start < self.window - 1) or start % POOLED_RATIO:
            return None
        if inputs.keep_from is not None and (not inputs.drop_rows or kept == self.chunk):
            return None
        shape = ChunkShape(next(width for width in self.widths if width >= blocks), start == 0, kept)
        return shape if shape in self.shapes else None

    def run(self, inputs: ModelInputs, shape: ChunkShape) -> tuple[Tensor, list[Tensor]]:
        """What `forward` gives for a step of `shape`; after a replay it stays there until the next one."""
        blocks = inputs.block_tables.shape[1]
        self._tokens.copy_(inputs.token_ids)
        self._positions.copy_(inputs.positions)
        self._context.copy_(inputs.context_lens)
        self._slot.copy_(inputs.state_slots)
        self._table[:blocks] = inputs.block_tables[0]
        self._table[blocks : shape.blocks] = 0
        if inputs.keep_from is not None:
            self._keep_from.copy_(inputs.keep_from)
        if not self._replays:
            return self.forward(self.inputs(shape))
        self._replays[shape].replay()
        assert self._logits is not None
        return self._logits[: len(inputs.logits_rows)], self._others[shape]

    def inputs(self, shape: ChunkShape) -> ModelInputs:
        """The step that a graph of `shape` reads, whatever the buffers hold at the moment."""
        sizes = self._start(shape.is_first), self.chunk, shape.kept
        lengths = HostLengths(*(np.array([n], np.int64) for n in sizes))
        inputs = ModelInputs(
            is_prefill=True,
            token_ids=self._tokens,
            positions=self._positions,
            query_start=self._query_start,
            context_lens=self._context,
            block_tables=self._table[: shape.blocks].unsqueeze(0),
            state_slots=self._slot,
            logits_rows=self._last_row if shape.kept else self._last_row[:0],
            lengths=lengths,
        )
        return inputs if shape.kept == self.chunk else replace(inputs, keep_from=self._keep_from, drop_rows=True)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all shapes, the largest first. Writes to the null block and the null slot only.

        Raises RuntimeError if one cannot be captured.
        """
        with GraphPool.measured(self._tokens.device, self.cost) as pool:
            for shape in sorted(self.shapes, key=lambda s: (s.blocks, s.kept), reverse=True):
                start = self._start(shape.is_first)
                self._positions.copy_(torch.arange(start, start + self.chunk))
                self._context.fill_(start + self.chunk)
                self._keep_from.fill_(start + self.chunk - shape.kept)
                self._capture(shape, self.inputs(shape), pool)
        logger.info("captured %d prefill graphs of %d tokens in %s", len(self._replays), self.chunk, self.cost)

    def _capture(self, shape: ChunkShape, inputs: ModelInputs, pool: GraphPool) -> None:
        logits, _ = pool.warm_up(lambda: self.forward(inputs))
        if self._logits is None:
            self._logits = logits.new_zeros(1, logits.shape[1])
        del logits
        graph = torch.cuda.CUDAGraph()
        with pool.capture(graph):
            logits, self._others[shape] = self.forward(inputs)
            self._logits[: len(logits)] = logits
        self._replays[shape] = graph
