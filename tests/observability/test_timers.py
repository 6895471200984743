"""CPU scopes against the clock; CUDA timers' bookkeeping against a simulated device; the real ones on a GPU."""

from __future__ import annotations

import time
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.observability.graph_timer import CUDAGraphTimer, EventBuffers
from deepinfer.observability.timers import WINDOW, CPUTimer, CUDATimer, Durations


def test_cpu_scopes_measure_wall_time_and_nest() -> None:
    timer = CPUTimer()
    with timer.scope("outer"):
        time.sleep(0.02)
        for _ in range(3):
            with timer.scope("inner"):
                time.sleep(0.01)
    times = timer.summary()
    assert times["inner"].count == 3 and times["outer"].count == 1
    assert 0.03 <= times["inner"].total < times["outer"].total - 0.02
    assert 0.01 <= times["inner"].median < 0.03 + times["inner"].total


def test_a_scope_that_raises_is_timed_too() -> None:
    timer = CPUTimer()
    with pytest.raises(KeyError), timer.scope("a"):
        raise KeyError
    assert timer.summary()["a"].count == 1


def test_off_costs_next_to_nothing_and_keeps_nothing() -> None:
    timer = CPUTimer(enabled=False)
    begin = time.process_time()
    for _ in range(10_000):
        with timer.scope("a"):
            pass
    assert (time.process_time() - begin) / 10_000 < 5e-6
    assert timer.summary() == {}


def test_durations_keep_a_window_and_true_totals() -> None:
    durations = Durations()
    for number in range(3 * WINDOW):
        durations.add("a", number)
    summary = durations.summary()["a"]
    assert summary.count == 3 * WINDOW
    assert summary.total == pytest.approx(sum(range(3 * WINDOW)) / 1e9)
    assert summary.median == pytest.approx((2.5 * WINDOW - 0.5) / 1e9)


class Device:
    """A device with one queue: work is done later, when `run` is called. Reading an unfinished event is an error."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queue: deque[tuple[str, object]] = deque()
        self.num_events = 0

    def event(self) -> SimulatedEvent:
        self.num_events += 1
        return SimulatedEvent(self)

    def work(self, milliseconds: float) -> None:
        self.queue.append(("work", milliseconds))

    def run(self, number: int | None = None) -> None:
        for _ in range(len(self.queue) if number is None else min(number, len(self.queue))):
            kind, value = self.queue.popleft()
            if kind == "work":
                self.now += value  # type: ignore[operator]
            else:
                value.pending -= 1  # type: ignore[attr-defined]
                value.time = self.now  # type: ignore[attr-defined]


class SimulatedEvent:
    def __init__(self, device: Device) -> None:
        self.device, self.pending, self.time = device, 0, None

    def record(self) -> None:
        self.pending += 1
        self.device.queue.append(("record", self))

    def query(self) -> bool:
        return self.pending == 0

    def elapsed_time(self, end: SimulatedEvent) -> float:
        assert self.query() and end.query(), "reading this event would have waited for the device"
        return end.time - self.time  # type: ignore[operator]


def test_cuda_scopes_are_read_when_they_have_finished_and_events_are_used_again() -> None:
    device = Device()
    timer = CUDATimer(event_factory=device.event)
    for number in range(50):
        with timer.scope("a"):
            device.work(number)
        if number % 5 == 4:
            device.run()
    assert timer.summary()["a"].total == pytest.approx(sum(range(50)) / 1e3)
    assert device.num_events <= 12
    with timer.scope("b"):
        device.work(1)
    assert "b" not in timer.summary()  # not finished, not waited for
    device.run()
    assert timer.summary()["b"].median == pytest.approx(1e-3)


class SimulatedGraph:
    """Three kernels with marks around them; `events` says where the marks of the next launch go."""

    def __init__(self, device: Device, buffers: EventBuffers) -> None:
        self.device, self.launched = device, 0
        self.events = [buffers.add(name) for name in ("start", "first", "second")] and buffers.marks[0]

    def set_events(self, events: list) -> None:
        self.events = events

    def replay(self) -> None:
        self.launched += 1
        for event, milliseconds in zip(self.events, (self.launched, 10 * self.launched, 0), strict=True):
            event.record()
            self.device.work(milliseconds)


@given(st.lists(st.integers(0, 12), max_size=40))
def test_ping_pong_reads_every_finished_replay_once_and_never_waits(progress: list[int]) -> None:
    """After each launch the device does progress[i] more pieces of work; elapsed_time asserts that nothing waits."""
    device = Device()
    buffers = EventBuffers(device.event, device.event)
    graph = SimulatedGraph(device, buffers)
    for pieces in progress:
        buffers.launch(graph.set_events, graph.replay)
        device.run(pieces)
    device.run()
    buffers.read()
    times = buffers.durations.summary()
    if not progress:
        assert times == {} and buffers.dropped == 0
        return
    assert set(times) == {"first", "second"}
    assert times["first"].count == times["second"].count == len(progress) - buffers.dropped
    assert times["second"].total == pytest.approx(10 * times["first"].total)
    assert times["first"].total <= sum(range(len(progress) + 1)) / 1e3 + 1e-9
    if not buffers.dropped:
        assert times["first"].total == pytest.approx(sum(range(len(progress) + 1)) / 1e3)


def test_stretches_of_one_name_add_up_to_one_time_a_replay() -> None:
    device = Device()
    shared = Durations()
    buffers = EventBuffers(device.event, device.event, shared)
    events = [buffers.add(name) for name in ("start", "a", "b", "a", "b")]

    def set_events(marks: list) -> None:
        events[:] = marks

    def replay() -> None:
        for event, milliseconds in zip(events, (1, 20, 300, 4000, 0), strict=True):
            event.record()
            device.work(milliseconds)

    for _ in range(3):
        buffers.launch(set_events, replay)
        device.run()
    buffers.read()
    times = shared.summary()
    assert times["a"].count == times["b"].count == 3
    assert times["a"].median == pytest.approx(0.301) and times["b"].median == pytest.approx(4.02)


def test_a_device_one_replay_behind_loses_nothing() -> None:
    device = Device()
    buffers = EventBuffers(device.event, device.event)
    graph = SimulatedGraph(device, buffers)
    pieces = 7  # three marks, three kernels, the end
    for _ in range(20):
        buffers.launch(graph.set_events, graph.replay)
        device.run(len(device.queue) - pieces)  # the replay just launched stays in the queue
    assert buffers.dropped == 0 and buffers.durations.summary()["first"].count == 18
    device.run()
    buffers.read()
    assert buffers.durations.summary()["first"].count == 20


def test_a_device_far_behind_drops_times_instead_of_waiting() -> None:
    device = Device()
    buffers = EventBuffers(device.event, device.event)
    graph = SimulatedGraph(device, buffers)
    for _ in range(10):
        buffers.launch(graph.set_events, graph.replay)
    assert buffers.dropped == 8
    device.run()
    buffers.read()
    assert buffers.durations.summary()["first"].count == 2


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_cuda_timer_on_a_gpu() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    timer = CUDATimer()
    for _ in range(10):
        with timer.scope("one"):
            a @ a
        with timer.scope("four"):
            for _ in range(4):
                a @ a
    torch.cuda.synchronize()
    times = timer.summary()
    assert times["one"].count == times["four"].count == 10
    assert 2 < times["four"].median / times["one"].median < 6


@pytest.mark.gpu
@needs_gpu
def test_graph_timer_on_a_gpu() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    a @ a
    torch.cuda.synchronize()
    timer = CUDAGraphTimer()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        timer.mark("start")
        out = a @ a
        timer.mark("one")
        for _ in range(4):
            out = out @ a * 1e-2
        timer.mark("four")
    timer.attach(graph)
    for _ in range(20):
        timer.replay()
        torch.cuda.synchronize()
    times = timer.summary()
    assert times["one"].count == times["four"].count == 20 and timer.dropped == 0
    assert 2 < times["four"].median / times["one"].median < 8
    assert torch.isfinite(out).all()
    # Without waiting, the CPU runs ahead: times are lost, nothing stalls and no time is counted twice.
    begin = time.perf_counter()
    for _ in range(50):
        timer.replay()
    ahead = time.perf_counter() - begin
    torch.cuda.synchronize()
    total = time.perf_counter() - begin
    assert ahead < 0.7 * total
    assert timer.summary()["one"].count + timer.dropped == 70
