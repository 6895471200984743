"""Timing of GPU work alone: CUDA graph replays, so that neither Python nor the launches are in it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

Run = Callable[[], object]


def time_us(runs: Sequence[Run], repeats: int = 15) -> float:
    """Median microseconds of one run; `runs` do the same on different inputs, all in one graph replay.

    Results are kept, so that runs write to different memory as well: what does not fit into the L2 cache together comes
    from memory and goes there, for ours as for the baseline.
    """
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [run() for run in runs]
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(runs))
    del results
    return statistics.median(times[3:])


LARGEST_COPY = 1 << 29  # bytes read and written: PyTorch copies more than 2 GiB at two thirds of the speed


def copy_bandwidth(size: int = LARGEST_COPY) -> float:
    """Bytes a second of a copy on this card that reads and writes `size` bytes in all, at most LARGEST_COPY."""
    half = min(size, LARGEST_COPY) // 2
    sources = [torch.randint(0, 256, (half,), dtype=torch.uint8, device="cuda") for _ in range(3)]
    targets = [torch.empty_like(source) for source in sources]
    copies = [partial(target.copy_, source) for source, target in zip(sources, targets, strict=True)]
    return 2 * half / time_us(copies) * 1e6


def matmul_rate() -> float:
    """BF16 FLOP/s of a large product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / time_us([lambda: a @ b], 9) * 1e6


def fp8_matmul_rate() -> float:
    """FP8 FLOP/s of a large product on random data, one scale a row."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    ones = torch.ones(8192, 1, device="cuda")
    product = partial(torch._scaled_mm, a, b.T, ones, ones.T, out_dtype=torch.bfloat16, use_fast_accum=True)
    return 2 * 8192**3 / time_us([product], 9) * 1e6
