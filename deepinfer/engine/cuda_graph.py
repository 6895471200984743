"""DecodeGraphs: decode steps padded to a few shapes, each captured once as a CUDA graph and replayed ever after.

A decode step launches hundreds of small kernels; a graph launches them with one call. It is frozen: shapes and
addresses are those of the capture. So a step is padded to the next shape of a ladder and its inputs are written to
stable buffers (step_buffers.py). Prefill steps vary more: see prefill_graphs.py.

On a CPU the same class runs the padded steps eagerly, or through torch.compile. What runs between two steps, such as a
draft head, is captured by draft_graphs.py.
"""

from __future__ import annotations

import logging
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from deepinfer.engine.graph_pool import CaptureCost, GraphPool
from deepinfer.engine.step_buffers import StepBuffers, StepShape, first_rows, pad_inputs
from deepinfer.models.inputs import ModelInputs
from deepinfer.observability.graph_timer import CUDAGraphTimer
from deepinfer.observability.timers import Durations
from deepinfer.speculation.slot_tokens import SlotTokens

logger = logging.getLogger(__name__)

NARROWEST = 256  # block-table columns up to which there is one width only
WIDTH_FACTOR = 8  # between the widths of longer tables
DRAFT_INTERVALS = 4  # of the ladder, between the sizes of steps that only drafts make so large


def batch_sizes(max_num_seqs: int, interval: int) -> list[int]:
    """Rows of the captured steps: powers of two below `interval`, its multiples, and max_num_seqs."""
    powers = [1 << i for i in range(interval.bit_length()) if 1 << i < min(interval, max_num_seqs)]
    return [*powers, *range(interval, max_num_seqs, interval), max_num_seqs]


def table_widths(max_blocks: int) -> list[int]:
    """Block-table columns of the captured steps. Work on a table grows with its width, even where it is unused."""
    widths = [max_blocks]
    while widths[0] > NARROWEST:
        widths.insert(0, -(-widths[0] // WIDTH_FACTOR))
    return widths


def step_shapes(max_num_seqs: int, interval: int, max_blocks: int, num_drafts: int = 0) -> list[StepShape]:
    """All shapes, by width, then rows. Wide tables get powers of two only: few long sequences run at a time.

    With drafts a sequence may have 1 + num_drafts rows; beyond max_num_seqs rows the steps of the ladder are wider.
    """
    narrow, *wide = table_widths(max_blocks)
    max_rows = max_num_seqs * (1 + num_drafts)
    with_drafts = [*range(max_num_seqs + DRAFT_INTERVALS * interval, max_rows, DRAFT_INTERVALS * interval), max_rows]
    rows_of_steps = batch_sizes(max_num_seqs, interval) + (with_drafts if num_drafts else [])
    shapes = [StepShape(rows, narrow) for rows in rows_of_steps]
    powers = batch_sizes(max_rows, 1 << max_rows.bit_length())
    return [*shapes, *(StepShape(rows, blocks) for blocks in wide for rows in powers)]


class DecodeGraphs:
    """Runs decode steps in captured shapes.

    Args:
        forward: ModelInputs of a decode step -> tensor [rows, ...]; no shape and no launch may depend on values.
        max_num_seqs: rows of the largest step, without drafts.
        interval: distance between captured batch sizes.
        max_blocks: columns of the widest block table.
        device: of the inputs. Graphs are captured on a GPU only.
        set_mark: takes what `forward` is to call with the name of the part that has just ended (None: nothing), while
            a graph is captured with times of its parts; None: no times.
        slot_tokens: tokens that the host does not know, for steps with drafts; None: there are none.
    """

    def __init__(
        self,
        forward: Callable[[ModelInputs], Tensor],
        max_num_seqs: int,
        interval: int,
        max_blocks: int,
        device: torch.device | str,
        set_mark: Callable[[Callable[[str], None] | None], None] | None = None,
        slot_tokens: SlotTokens | None = None,
    ) -> None:
        self.forward = forward
        num_drafts = 0 if slot_tokens is None else slot_tokens.num_drafts
        self.shapes = step_shapes(max_num_seqs, interval, max_blocks, num_drafts)
        self.num_slots = max_num_seqs + 1
        self.device = torch.device(device)
        self.buffers = StepBuffers(StepShape(self.shapes[-1].rows, max_blocks), device, slot_tokens)
        self.inputs = {shape: self.buffers.inputs(shape) for shape in self.shapes}
        self.cost = CaptureCost()
        self.part_times = Durations()  # of replayed steps, by part
        self._views: dict[tuple[StepShape, int], ModelInputs] = {}
        self._set_mark = set_mark
        self._replays: dict[StepShape, Callable[[], None]] = {}
        self._timers: list[CUDAGraphTimer] = []
        self._outputs: Tensor | None = None  # [rows of the largest step, ...]

    @property
    def is_captured(self) -> bool:
        """Whether steps are replayed; else they run padded, but eagerly."""
        return bool(self._replays)

    @property
    def is_timed(self) -> bool:
        """Whether the graphs time their parts."""
        return self._set_mark is not None

    def shape_of(self, num_rows: int, num_blocks: int) -> StepShape:
        """The smallest captured shape that holds a step. Raises ValueError if none does."""
        for shape in self.shapes:
            if shape.rows >= num_rows and shape.blocks >= num_blocks:
                return shape
        raise ValueError(f"a decode step of {num_rows} sequences with {num_blocks} blocks exceeds {self.shapes[-1]}")

    def run(self, inputs: ModelInputs) -> Tensor:
        """What `forward` gives for the rows of a decode step; after a replay it stays there until the next one."""
        num_rows, num_blocks = inputs.block_tables.shape
        shape = self.shape_of(num_rows, num_blocks)
        padded = self.inputs[shape]
        if inputs.block_tables.data_ptr() != padded.block_tables.data_ptr():  # else it was written in place
            pad_inputs(inputs, padded)
        if not self.is_captured:
            return self._forward(padded)[:num_rows]
        assert self._outputs is not None
        self._replays[shape]()
        # One buffer serves all graphs: the sampler's reads of it are launched before the next step's forward, and both
        # are on one stream.
        return self._outputs[:num_rows]

    def rows(self, shape: StepShape, num_rows: int) -> ModelInputs:
        """The first rows of the stable inputs: what `run` takes for a step that was written there."""
        key = shape, num_rows
        if key not in self._views:
            self._views[key] = first_rows(self.inputs[shape], num_rows)
        return self._views[key]

    def _forward(self, padded: ModelInputs) -> Tensor:
        """`forward` with the tokens in place that the host did not know."""
        return self.forward(self.buffers.slot_tokens.fill(padded))

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all shapes, the largest first, so that the others find their memory in its pool.

        Writes to the null block and the null slot only. Raises RuntimeError naming the shape that cannot be captured.
        """
        with GraphPool.measured(self.device, self.cost) as pool:
            for shape in sorted(self.shapes, key=lambda s: s.rows * s.blocks, reverse=True):
                try:
                    self._replays[shape] = self._capture(shape, pool)
                except Exception as error:
                    self._replays.clear()
                    raise RuntimeError(f"a decode step of {shape} cannot be captured: {_cause(error)}") from error
        largest = self.shapes[-1].rows
        logger.info("captured %d decode graphs of up to %d sequences in %s", len(self.shapes), largest, self.cost)

    def _capture(self, shape: StepShape, pool: GraphPool) -> Callable[[], None]:
        padded = self.inputs[shape]
        self._write_padding(padded)
        outputs = pool.warm_up(lambda: self._forward(padded))
        if self._outputs is None:
            self._outputs = outputs.new_zeros(self.shapes[-1].rows, *outputs.shape[1:])
        del outputs
        timer = None if self._set_mark is None else CUDAGraphTimer(self.part_times)
        graph = torch.cuda.CUDAGraph(keep_graph=timer is not None)
        with pool.capture(graph), self._marks(timer):
            self._outputs[: shape.rows] = self._forward(padded)
        if timer is None:
            return graph.replay
        timer.attach(graph)
        self._timers.append(timer)
        return timer.replay

    @contextmanager
    def _marks(self, timer: CUDAGraphTimer | None) -> Iterator[None]:
        if timer is None or self._set_mark is None:
            yield
            return
        timer.mark("start")
        self._set_mark(timer.mark)
        try:
            yield
        finally:
            self._set_mark(None)
            timer.mark("rest")

    @staticmethod
    def _write_padding(padded: ModelInputs) -> None:
        for part in (padded.token_ids, padded.positions, padded.state_slots, padded.block_tables):
            part.zero_()
        padded.context_lens.fill_(1)

    def read_part_times(self) -> Durations:
        """Times of the parts of all replays that have finished; never waits."""
        for timer in self._timers:
            timer.read()
        return self.part_times

    @torch.inference_mode()
    def step_times(
        self,
        context_len: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        repeats: int = 5,
        powers_only: bool = False,
    ) -> dict[int, float]:
        """Milliseconds of a decode step by batch size, medians of `repeats`, at sequences of `context_len` tokens.

        `powers_only`: of powers of two and of the largest size.
        Writes blocks 1 to num_blocks - 1 and all slots: call it while no sequence runs.
        """
        times: dict[int, float] = {}
        largest = max(shape.rows for shape in self.shapes)
        for shape in self.shapes:
            wanted = not powers_only or shape.rows == largest or shape.rows.bit_count() == 1
            if wanted and shape.rows not in times and shape.blocks * block_size >= context_len:
                self._write_context(self.inputs[shape], context_len, block_size, num_blocks)
                # Different tokens, so that they choose different experts.
                tokens = torch.arange(shape.rows, device=self.device) * 7919 % vocab_size
                self.inputs[shape].token_ids.copy_(tokens)
                times[shape.rows] = self._time(shape, repeats)
        return times

    def _write_context(self, padded: ModelInputs, context_len: int, block_size: int, num_blocks: int) -> None:
        rows, used = len(padded.token_ids), -(-context_len // block_size)
        blocks = torch.arange(rows * used, device=self.device, dtype=torch.int32) % (num_blocks - 1) + 1
        padded.token_ids.zero_()
        padded.positions.fill_(context_len - 1)
        padded.context_lens.fill_(context_len)
        padded.state_slots.copy_(torch.arange(rows) % (self.num_slots - 1) + 1)
        padded.block_tables.zero_()
        padded.block_tables[:, :used] = blocks.view(rows, used)

    def _time(self, shape: StepShape, repeats: int) -> float:
        """Median milliseconds of a step that holds a whole shape."""
        padded = self.inputs[shape]
        self.run(padded)
        if self.device.type != "cuda":
            return statistics.median(_timed(lambda: self.run(padded)) for _ in range(repeats))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            self.run(padded)
            event.record()
        events[-1].synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False))


def _cause(error: BaseException) -> str:
    """Where and why a capture failed: the first of a chain of errors, the others only follow from it."""
    while error.__context__ is not None:
        error = error.__context__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}{where}: {first_line}"


def _timed(call: Callable[[], object]) -> float:
    begin = time.thread_time()
    call()
    return (time.thread_time() - begin) * 1e3
