"""Two clocks: named scopes on the CPU, and pairs of events on a GPU stream (inside a CUDA graph: graph_timer.py).

Reading never waits for the device: a time that is not ready yet is read later.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

WINDOW = 1024  # durations kept a name
SCOPE_PREFIX = "engine: "  # of CPUTimer's scopes in a trace


class Event(Protocol):
    """What the timers need of torch.cuda.Event."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds."""
        ...


@dataclass(frozen=True)
class ScopeTime:
    """One name: how often and how long since the start (seconds), and the median of the latest WINDOW runs."""

    count: int
    total: float
    median: float


class Durations:
    """Durations by name in nanoseconds: totals for ever, single values for the latest WINDOW. Never grows beyond."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._totals: dict[str, int] = {}
        self._latest: dict[str, array] = {}

    def add(self, name: str, nanoseconds: int) -> None:
        """One run of `name`."""
        count = self._counts.get(name, 0)
        if count < WINDOW:
            self._latest.setdefault(name, array("q")).append(nanoseconds)
        else:
            self._latest[name][count % WINDOW] = nanoseconds
        self._counts[name] = count + 1
        self._totals[name] = self._totals.get(name, 0) + nanoseconds

    def summary(self) -> dict[str, ScopeTime]:
        """Times by name."""
        return {
            name: ScopeTime(count, self._totals[name] / 1e9, statistics.median(self._latest[name]) / 1e9)
            for name, count in self._counts.items()
        }


class CPUTimer:
    """Wall time of `with timer.scope(name)`. Off, a scope is one shared object that does nothing.

    While `annotated`, scopes are ranges of the profiler's trace instead, under SCOPE_PREFIX and their name.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.annotated = False
        self.durations = Durations()
        self._scopes: dict[str, _Scope] = {}

    def scope(self, name: str) -> AbstractContextManager:
        """Scopes of different names nest; one name inside itself does not."""
        if self.annotated:
            from torch.profiler import record_function

            return record_function(SCOPE_PREFIX + name)
        if not self.enabled:
            return _OFF
        scope = self._scopes.get(name)
        if scope is None:
            scope = self._scopes[name] = _Scope(name, self.durations)
        return scope

    def summary(self) -> dict[str, ScopeTime]:
        """Times by scope."""
        return self.durations.summary()


_OFF: AbstractContextManager = nullcontext()


class _Scope(AbstractContextManager):
    """Made once a name and used again: timing allocates nothing."""

    __slots__ = ("_name", "_durations", "_start")

    def __init__(self, name: str, durations: Durations) -> None:
        self._name, self._durations, self._start = name, durations, 0

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, *exception: object) -> None:
        self._durations.add(self._name, time.perf_counter_ns() - self._start)


class CUDATimer:
    """GPU time of `with timer.scope(name)` on the current stream, from pairs of events that are used again.

    Finished pairs are read when a later scope ends and by `summary`; those still running are left for the next time.
    """

    def __init__(self, enabled: bool = True, event_factory: Callable[[], Event] | None = None) -> None:
        self.enabled = enabled
        self.durations = Durations()
        self._new_event = event_factory or timing_event
        self._free: list[Event] = []
        self._pending: deque[tuple[str, Event, Event]] = deque()  # in stream order, oldest first

    @contextmanager
    def _measure(self, name: str) -> Iterator[None]:
        start, end = self._take(), self._take()
        start.record()
        try:
            yield
        finally:
            end.record()
            self._pending.append((name, start, end))
            self._read_finished()

    def scope(self, name: str) -> AbstractContextManager:
        """Time on the stream of what is launched inside, without a wait."""
        return self._measure(name) if self.enabled else _OFF

    def summary(self) -> dict[str, ScopeTime]:
        """Times by name, of the pairs of events that are ready."""
        self._read_finished()
        return self.durations.summary()

    def _take(self) -> Event:
        return self._free.pop() if self._free else self._new_event()

    def _read_finished(self) -> None:
        while self._pending and self._pending[0][2].query():
            name, start, end = self._pending.popleft()
            self.durations.add(name, round(start.elapsed_time(end) * 1e6))
            self._free += (start, end)


def timing_event(external: bool = False) -> Event:
    """A CUDA event with time; `external` becomes a node of the graph when recorded during a capture."""
    import torch

    return torch.cuda.Event(enable_timing=True, external=external)
