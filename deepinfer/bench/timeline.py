"""Host and device lanes of a profiler trace: how long the device was idle, and a picture of a few steps."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from deepinfer.observability.timers import SCOPE_PREFIX

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
HOST_COLOURS = {
    "schedule": "#4e79a7",
    "inputs": "#76b7b2",
    "forward": "#f28e2b",
    "read": "#bab0ac",
    "postprocess": "#59a14f",
    "observe": "#edc948",
    "sample": "#e15759",
}
DEVICE_COLOUR = "#7b5ea7"


@dataclass(frozen=True, slots=True)
class Interval:
    """Microseconds after the timeline's origin. `launched`: when the host had handed over what the device does."""

    name: str
    start: float
    end: float
    launched: float | None = None


@dataclass
class Timeline:
    """The engine's scopes on the host, and what the device executed (empty without a GPU), both by start."""

    host: list[Interval] = field(default_factory=list)
    device: list[Interval] = field(default_factory=list)
    origin: int = 0  # nanoseconds since 1970

    @property
    def steps(self) -> list[float]:
        """When each step began, in microseconds."""
        return [scope.start for scope in self.host if scope.name == "schedule"]

    def idle_share(self, start: float, end: float) -> float:
        """Share of [start, end] in which nothing ran on the device."""
        clipped = (Interval(i.name, max(i.start, start), min(i.end, end)) for i in self.device)
        busy = sum(i.end - i.start for i in merged([i for i in clipped if i.end > i.start]))
        return 1 - busy / (end - start)

    def drained_share(self, start: float, end: float) -> float:
        """Share of [start, end] in which the device was idle because the host had not launched what came next.

        The rest of the idle share is between operations that were queued: too short for the host to be the reason.
        """
        drained, busy_until = 0.0, start
        for operation in self.device:
            if operation.end <= start:
                continue
            gap_end = min(operation.start, end)
            if operation.launched is not None and gap_end > busy_until:
                drained += max(min(operation.launched, gap_end) - busy_until, 0.0)
            busy_until = max(busy_until, operation.end)
            if busy_until >= end:
                break
        return drained / (end - start)

    def between(self, start: float, end: float) -> Timeline:
        """What lies in [start, end], at least in part."""
        host, device = ([i for i in lane if i.end > start and i.start < end] for lane in (self.host, self.device))
        return Timeline(host, device, self.origin)

    def save(self, path: Path) -> None:
        """A Chrome trace of these lanes alone, gzipped: small enough to keep."""
        events = [
            {"ph": "X", "pid": 0, "tid": lane, "name": i.name[:80], "ts": i.start, "dur": i.end - i.start}
            | ({} if i.launched is None else {"args": {"launched": i.launched}})
            for lane, intervals in (("host", self.host), ("device", self.device))
            for i in intervals
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode(), mtime=0))


def read_trace(path: Path) -> Timeline:
    """The lanes of a Chrome trace that torch.profiler wrote, or `Timeline.save`."""
    content = path.read_bytes()
    raw = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    events = [event for event in raw["traceEvents"] if event.get("ph") == "X"]
    launches = {  # what the host calls and what the device does carry one number
        event["args"]["correlation"]: event["ts"] + event["dur"]
        for event in events
        if event.get("cat") in LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
    }
    timeline = Timeline(origin=raw.get("baseTimeNanoseconds", 0))
    for event in events:
        name, start, arguments = event["name"], event["ts"], event.get("args", {})
        end, category, lane = start + event["dur"], event.get("cat"), event.get("tid")
        if category in DEVICE_CATEGORIES or lane == "device":
            launched = arguments.get("launched", launches.get(arguments.get("correlation")))
            timeline.device.append(Interval(name, start, end, launched))
        elif (category == "user_annotation" and name.startswith(SCOPE_PREFIX)) or lane == "host":
            timeline.host.append(Interval(name.removeprefix(SCOPE_PREFIX), start, end))
    timeline.host.sort(key=lambda i: i.start)
    timeline.device.sort(key=lambda i: i.start)
    return timeline


def merged(intervals: list[Interval], gap: float = 0.0) -> list[Interval]:
    """The union, by start; neighbours at most `gap` microseconds apart are joined."""
    union: list[Interval] = []
    for interval in sorted(intervals, key=lambda i: i.start):
        if union and interval.start <= union[-1].end + gap:
            last = union[-1]
            union[-1] = Interval(last.name, last.start, max(last.end, interval.end))
        else:
            union.append(interval)
    return union


# ------------------------------------------------------------------ picture

WIDTH, LEFT, LANE, TITLE = 960, 100, 16, 26


def draw(panels: dict[str, Timeline], num_steps: int = 3) -> str:
    """An SVG with a panel for each timeline, all on one time scale: `num_steps` steps from the middle of each."""
    spans = {}
    for title, timeline in panels.items():
        first = max((len(timeline.steps) - num_steps) // 2, 0)
        last = min(first + num_steps, len(timeline.steps) - 1)
        spans[title] = timeline.steps[first], timeline.steps[last]
    longest = max(end - start for start, end in spans.values())
    scale = (WIDTH - LEFT - 10) / longest
    parts: list[str] = []
    top = 0.0
    for title, timeline in panels.items():
        start, end = spans[title]
        lanes = [name for name in HOST_COLOURS if any(i.name == name for i in timeline.host)]
        lanes += ["device"] if timeline.device else []
        parts.append(f'<text x="8" y="{top + 18:.0f}" font-weight="bold">{escape(title)}</text>')
        inside = timeline.between(start, end)
        for row, name in enumerate(lanes):
            y = top + TITLE + row * LANE
            device = name == "device"
            found = merged(inside.device, 1 / scale / 4) if device else [i for i in inside.host if i.name == name]
            parts.append(f'<text x="{LEFT - 6}" y="{y + 12:.0f}" text-anchor="end">{name}</text>')
            colour = DEVICE_COLOUR if device else HOST_COLOURS[name]
            for interval in found:
                x = LEFT + (max(interval.start, start) - start) * scale
                width = max((min(interval.end, end) - max(interval.start, start)) * scale, 0.3)
                box = f'x="{x:.2f}" y="{y + 2:.0f}" width="{width:.2f}" height="{LANE - 4}"'
                parts.append(f'<rect {box} fill="{colour}"/>')
        bottom = top + TITLE + len(lanes) * LANE
        for step in timeline.steps:
            if start <= step <= end:
                x = LEFT + (step - start) * scale
                parts.append(
                    f'<path d="M{x:.2f} {top + TITLE:.0f}V{bottom:.0f}" stroke="#999" stroke-dasharray="2 2"/>'
                )
        top = bottom + 10
    for tick in range(5):
        x, value = LEFT + longest * scale * tick / 4, longest * tick / 4
        anchor = "end" if tick == 4 else "middle"
        parts.append(f'<text x="{x:.0f}" y="{top + 12:.0f}" text-anchor="{anchor}">{value / 1000:.2f} ms</text>')
    height = top + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" '
    return head + 'font-size="11"><rect width="100%" height="100%" fill="white"/>' + "".join(parts) + "</svg>\n"
