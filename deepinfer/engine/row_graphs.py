"""RowGraphs: a function with one row a sequence, padded to a few batch sizes, each captured once as a CUDA graph.

The second graph runner beside DecodeGraphs: for calls between two steps whose arguments are on the device already, such
as the draft head's. On a CPU the padded calls run eagerly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

WARM_UPS = 2  # eager runs before a capture: kernels are compiled and tuned in the first


class RowGraphs:
    """Runs `call` in captured sizes.

    Args:
        call: tensors [S, ...] -> tensors [S, ...]; no shape and no launch may depend on values.
        padding: a row of each argument, of its dtype and on its device: what the rows behind the last sequence hold.
        sizes: numbers of rows to capture, ascending.
    """

    def __init__(self, call: Callable[..., Sequence[Tensor]], padding: Sequence[Tensor], sizes: Sequence[int]) -> None:
        self.call = call
        self.sizes = list(sizes)
        self.capture_seconds = 0.0
        self._padding = list(padding)
        self._inputs = [row.unsqueeze(0).repeat(self.sizes[-1], *[1] * row.dim()) for row in padding]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: list[Tensor] = []  # of the largest size; all graphs write there

    @property
    def is_captured(self) -> bool:
        return bool(self._graphs)

    def run(self, *arguments: Tensor) -> list[Tensor]:
        """What `call` gives for the arguments' rows; after a replay it stays there until the next one.

        Raises ValueError if there are more rows than in the largest size.
        """
        num_rows = len(arguments[0])
        size = next((size for size in self.sizes if size >= num_rows), None)
        if size is None:
            raise ValueError(f"a call of {num_rows} rows exceeds {self.sizes[-1]}, the largest captured size")
        for buffer, argument, row in zip(self._inputs, arguments, self._padding, strict=True):
            buffer[:num_rows] = argument
            if size > num_rows:
                buffer[num_rows:size] = row
        if not self._graphs:
            return [part[:num_rows] for part in self._padded_call(size)]
        self._graphs[size].replay()
        return [part[:num_rows] for part in self._outputs]

    def _padded_call(self, size: int) -> list[Tensor]:
        return list(self.call(*(buffer[:size] for buffer in self._inputs)))

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, the largest first, so that the others find their memory in its pool.

        Calls write what `call` writes for rows of padding.
        """
        begin, device = time.monotonic(), self._inputs[0].device
        for buffer, row in zip(self._inputs, self._padding, strict=True):
            buffer[:] = row
        with torch.cuda.device(device):
            pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            for size in reversed(self.sizes):
                self._graphs[size] = self._capture(size, pool, stream)
        torch.cuda.synchronize(device)
        self.capture_seconds = time.monotonic() - begin
        logger.info("captured calls of up to %d rows in %.1f s", self.sizes[-1], self.capture_seconds)

    def _capture(self, size: int, pool: Any, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                outputs = self._padded_call(size)
            if not self._outputs:
                self._outputs = [torch.zeros_like(part) for part in outputs]
        torch.cuda.synchronize()
        del outputs
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do on the device meanwhile is no business of this capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            for target, part in zip(self._outputs, self._padded_call(size), strict=True):
                target[:size] = part
        return graph
