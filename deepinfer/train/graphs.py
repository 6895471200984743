"""Replay a training step as a CUDA graph: a step here is some thousand small kernels, too many to launch one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


class GraphedStep:
    """Calls `compute(*tensors, key)`; on CUDA, captures it once per key (bool or int) and replays it after that.

    `compute` must have no host synchronisation and fixed shapes. What it returns is overwritten by the next call.
    """

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        *tensors, key = arguments
        if not tensors[0].is_cuda:
            return self._compute(*tensors, key)
        if key not in self._captured:
            self._captured.clear()  # frees the memory of a phase that is over
            self._captured[key] = self._capture(tensors, key)
        graph, inputs, outputs = self._captured[key]
        for static, tensor in zip(inputs, tensors, strict=True):
            static.copy_(tensor)
        graph.replay()
        return outputs

    def _capture(self, tensors: list[Tensor], key: Hashable) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Any]:
        inputs = [tensor.clone() for tensor in tensors]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles, and warms the allocator and the libraries
                self._compute(*inputs, key)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self._compute(*inputs, key)
        return graph, inputs, outputs


class Throttle:
    """Keeps the host at most `ahead` steps before the device, so that host clocks mean something."""

    def __init__(self, ahead: int = 2) -> None:
        self._ahead = ahead
        self._events: deque[torch.cuda.Event] = deque()

    def step(self, on_gpu: bool) -> None:
        """Wait until the device is at most `ahead` steps behind."""
        if not on_gpu:
            return
        event = torch.cuda.Event()
        event.record()
        self._events.append(event)
        if len(self._events) > self._ahead:
            self._events.popleft().synchronize()
