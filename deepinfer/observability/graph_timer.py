"""CUDAGraphTimer: times inside a captured CUDA graph, where no timing call can be inserted between the kernels.

The graph itself contains event-record nodes. They point into one of two buffers of events and change over before every
replay, so that the times of one replay are read while the next one runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from deepinfer.observability.timers import Durations, Event, ScopeTime, timing_event

EVENT_RECORD_NODE = 7  # CU_GRAPH_NODE_TYPE_EVENT_RECORD


class EventBuffers:
    """Two buffers of the same marks, and which of them the next replay writes. Knows nothing of graphs.

    Stretches of one name are added up: a replay adds one duration a name. Several buffers may share `durations`.
    `done` of a buffer is recorded behind the replay: only then do the events inside the graph belong to that replay.
    """

    def __init__(
        self, new_mark: Callable[[], Event], new_done: Callable[[], Event], durations: Durations | None = None
    ) -> None:
        self.names: list[str] = []
        self.marks: tuple[list[Event], list[Event]] = ([], [])
        self.durations = Durations() if durations is None else durations
        self.dropped = 0
        self._new_mark = new_mark
        self._done = (new_done(), new_done())
        self._unread = [False, False]
        self._next = 0

    def add(self, name: str) -> Event:
        """A new mark; `name` is the stretch that ends here, so the first mark's name is not reported."""
        self.names.append(name)
        for marks in self.marks:
            marks.append(self._new_mark())
        return self.marks[0][-1]

    def launch(self, set_marks: Callable[[list[Event]], None], replay: Callable[[], None]) -> None:
        """Replay into the next buffer. The times that it overwrites are taken in if they are ready, else dropped."""
        self.read()
        index, self._next = self._next, self._next ^ 1
        self.dropped += self._unread[index]
        set_marks(self.marks[index])
        replay()
        self._done[index].record()
        self._unread[index] = True

    def read(self) -> None:
        """Take in the times of every replay that has finished; never waits."""
        for index in (self._next, self._next ^ 1):  # the older one first
            if not self._unread[index] or not self._done[index].query():
                continue
            self._unread[index] = False
            marks = self.marks[index]
            milliseconds: dict[str, float] = {}
            for name, start, end in zip(self.names[1:], marks, marks[1:], strict=False):
                milliseconds[name] = milliseconds.get(name, 0.0) + start.elapsed_time(end)
            for name, total in milliseconds.items():
                self.durations.add(name, round(total * 1e6))


class CUDAGraphTimer:
    """Times of the stretches between the marks of one graph, taken into `durations` (None: its own).

    timer = CUDAGraphTimer()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        timer.mark("start")
        ...
        timer.mark("attention")
    timer.attach(graph)
    timer.replay()  # in place of graph.replay()
    """

    def __init__(self, durations: Durations | None = None) -> None:
        self._buffers = EventBuffers(lambda: timing_event(external=True), timing_event, durations)
        self._graph: Any = None
        self._nodes: EventNodes | None = None

    @property
    def dropped(self) -> int:
        """Replays whose times were overwritten before they were ready: the CPU was two replays ahead."""
        return self._buffers.dropped

    def mark(self, name: str) -> None:
        """Call while the graph is captured: becomes an event-record node."""
        self._buffers.add(name).record()

    def attach(self, graph: Any) -> None:
        """Make a captured graph (keep_graph=True) executable and find its event nodes.

        Raises RuntimeError if a mark is not in the graph or the driver refuses.
        """
        graph.instantiate()
        first, second = self._buffers.marks
        for event in second:
            event.record()  # outside the capture: a CUDA event exists only once recorded
        self._graph = graph
        self._nodes = EventNodes(graph.raw_cuda_graph(), graph.raw_cuda_graph_exec(), first)

    def replay(self) -> None:
        """Launch the graph on the current stream, and take in the times of earlier replays that have finished."""
        if self._nodes is None:
            raise RuntimeError("CUDAGraphTimer: attach a captured graph before replay")
        self._buffers.launch(self._nodes.set_events, self._graph.replay)

    def read(self) -> None:
        """Take in the times of every replay that has finished; never waits."""
        self._buffers.read()

    def summary(self) -> dict[str, ScopeTime]:
        """Times by name, of the replays whose events are ready."""
        self.read()
        return self._buffers.durations.summary()


class EventNodes:
    """The event-record nodes of an executable graph, through the CUDA driver (PyTorch has no call for this)."""

    def __init__(self, graph: int, executable: int, events: list[Event]) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._executable = ctypes.c_void_p(executable)
        count = ctypes.c_size_t()
        self._call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
        nodes = (ctypes.c_void_p * count.value)()
        self._call("cuGraphGetNodes", ctypes.c_void_p(graph), nodes, ctypes.byref(count))
        by_event: dict[int, int] = {}
        for node in nodes:
            kind, event = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
            if kind.value == EVENT_RECORD_NODE:
                self._call("cuGraphEventRecordNodeGetEvent", ctypes.c_void_p(node), ctypes.byref(event))
                by_event[event.value or 0] = node or 0
        handles = [_handle(event) for event in events]
        if not set(handles) <= set(by_event):
            raise RuntimeError(f"CUDAGraphTimer: {len(events)} marks, {len(by_event)} event nodes in the graph")
        self._nodes = [ctypes.c_void_p(by_event[handle]) for handle in handles]

    def set_events(self, events: list[Event]) -> None:
        """Point the nodes at other events, for later launches; a launch under way is not affected."""
        for node, event in zip(self._nodes, events, strict=True):
            self._call("cuGraphExecEventRecordNodeSetEvent", self._executable, node, ctypes.c_void_p(_handle(event)))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"CUDAGraphTimer: {name} failed with CUDA error {status}")


def _handle(event: Any) -> int:
    return int(event.cuda_event)
