"""GraphPool: how every runner captures its CUDA graphs, and what that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

WARM_UPS = 2  # eager runs before a capture: kernels are compiled and tuned in the first
Result = TypeVar("Result")


@dataclass
class CaptureCost:
    """What the graphs of a runner took at start-up, and hold of the device's memory."""

    seconds: float = 0.0
    num_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, {self.num_bytes / 2**20:.0f} MiB"


def capture_cost(runners: Iterable[object]) -> CaptureCost:
    """Of all these together that have captured something."""
    costs = [runner.cost for runner in runners if hasattr(runner, "cost")]
    return CaptureCost(sum(cost.seconds for cost in costs), sum(cost.num_bytes for cost in costs))


class GraphPool:
    """The memory and the stream that a runner's graphs share: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    @classmethod
    @contextmanager
    def measured(cls, device: torch.device, cost: CaptureCost) -> Iterator[GraphPool]:
        """A pool on `device` for all captures of a runner, of which `cost` learns what they took."""
        torch.cuda.empty_cache()
        begin, free = time.monotonic(), torch.cuda.mem_get_info(device)[0]
        with torch.cuda.device(device):
            yield cls()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what the warm-ups used is of no use to another stream
        cost.seconds = time.monotonic() - begin
        cost.num_bytes = max(free - torch.cuda.mem_get_info(device)[0], 0)

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
