"""GraphPool: how every runner captures its CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

WARM_UPS = 2  # eager runs before a capture: kernels are compiled and tuned in the first
Result = TypeVar("Result")


class GraphPool:
    """The memory and the stream that a runner's graphs share: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def warm_up(self, run: Callable[[], Result]) -> Result:
        """What `run` gives when it is run eagerly, as it has to be before it is captured."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                result = run()
        torch.cuda.synchronize()
        return result

    def capture(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager:
        """What is launched inside becomes the graph. What other threads do on the device meanwhile does not matter."""
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
