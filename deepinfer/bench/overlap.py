"""`deepinfer bench overlap`: what overlapped scheduling gains in decoding, and how long the device is idle.

Two engines over one model, overlapped scheduling on and off, decode the same batch in alternation. Then each decodes
a few steps under the profiler: the device is busy in the union of its kernels and copies, idle in the rest of a step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from deepinfer.bench import results
from deepinfer.bench.decode import add_model_options, add_requests, decode, model_name, prefill, step, synchronize
from deepinfer.bench.synthetic import benchmark_engine, benchmark_model, num_blocks
from deepinfer.bench.timeline import Interval, Timeline, draw, read_trace
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.models.registry import Model
from deepinfer.observability.timers import CPUTimer

AREA = "overlap"
IDLE_TARGET = 0.03
TRACED_STEPS = 16
SKIPPED_STEPS = 3  # of a trace: the profiler's own start
FILE_OPTIONS = ("--traces", "--picture")


@dataclass
class Load:
    """What both engines decode."""

    batch: int
    prompt_len: int
    rounds: int
    steps: int  # of a round
    cuda_graphs: bool | None = None  # as in EngineConfig

    @property
    def max_tokens(self) -> int:
        return (self.rounds + 2) * self.steps + 2 * TRACED_STEPS


def decoding_engine(model: Model, overlapped: bool, load: Load, device: str) -> Engine:
    """An engine in the middle of decoding its batch."""
    config = EngineConfig(
        max_num_seqs=load.batch,
        max_model_len=load.prompt_len + load.max_tokens,
        num_blocks=num_blocks(load.batch, load.prompt_len + load.max_tokens),  # two engines share the device
        watermark=0.0,
        device=device,
        cuda_graphs=load.cuda_graphs,
        cudagraph_batch_size_interval=load.batch,  # other sizes are not used
        zero_overhead_scheduling=overlapped,
    )
    engine = benchmark_engine(model, config)
    add_requests(engine, load.batch, load.prompt_len, load.max_tokens)
    prefill(engine)
    decode(engine, load.steps)  # warms up
    return engine


class ScopeRecorder(CPUTimer):
    """Times of every scope, without the profiler, whose own ranges and operators would slow the host down."""

    def __init__(self) -> None:
        super().__init__()
        self.scopes: list[tuple[str, int, int]] = []  # name, start and end in nanoseconds since 1970

    @contextmanager
    def _record(self, name: str) -> Iterator[None]:
        start = time.time_ns()
        yield
        self.scopes.append((name, start, time.time_ns()))

    def since(self, origin: int) -> list[Interval]:
        """The scopes in microseconds after `origin`, nanoseconds since 1970."""
        return [Interval(name, (start - origin) / 1e3, (end - origin) / 1e3) for name, start, end in self.scopes]

    def scope(self, name: str) -> AbstractContextManager:
        return self._record(name)


def trace(engine: Engine, folder: Path) -> Timeline:
    """TRACED_STEPS decode steps, with what the profiler saw on a GPU."""
    device, timer, recorder = engine.config.device, engine.observer.timer, ScopeRecorder()
    profiler = None
    if device != "cpu":
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    engine.observer.timer = recorder
    try:
        with profiler or nullcontext():
            for _ in range(TRACED_STEPS):
                step(engine)
            synchronize(device)
    finally:
        engine.observer.timer = timer
    if profiler is None:
        return Timeline(recorder.since(recorder.scopes[0][1]))
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    timeline = read_trace(path)
    return Timeline(recorder.since(timeline.origin), timeline.device)


def measure(
    model: Model, name: str, load: Load, device: str, command: str
) -> tuple[list[results.Record], list[Timeline]]:
    """The records, and the timelines with overlap off and on."""
    engines = {overlapped: decoding_engine(model, overlapped, load, device) for overlapped in (False, True)}
    graphs = getattr(engines[True].runner, "graphs", None)
    if device != "cpu" and (graphs is None or not graphs.is_captured):  # switched off, or not possible
        name += ", without CUDA graphs"
    samples = []
    for _ in range(load.rounds):
        seconds = {overlapped: decode(engine, load.steps) for overlapped, engine in engines.items()}
        samples.append({"off": 1e3 * seconds[False], "on": 1e3 * seconds[True]})
        print("  " + ", ".join(f"{which} {value:.3f} ms a step" for which, value in samples[-1].items()), flush=True)
    milliseconds = {which: median(sample[which] for sample in samples) for which in ("off", "on")}
    hardware = None if device != "cpu" else results.cpu_device_name()
    records = [
        results.measured(
            f"decode with overlapped scheduling, batch {load.batch} ({name})",
            part="2",
            unit="tok/s",
            value=load.batch / milliseconds["on"] * 1e3,
            baseline_name="off",
            baseline_value=load.batch / milliseconds["off"] * 1e3,
            command=command,
            samples=samples,
            device=hardware,
        )
    ]
    timelines = []
    with TemporaryDirectory() as folder:
        for which, engine in (("off", engines[False]), ("on", engines[True])):
            timeline = trace(engine, Path(folder))
            start, end = timeline.steps[SKIPPED_STEPS], timeline.steps[-1]
            timelines.append(timeline.between(start, end))
            if timeline.device:
                records.append(idle_record(timeline, start, end, milliseconds[which], which, load, name, command))
    return records, timelines


def idle_record(
    timeline: Timeline, start: float, end: float, untraced: float, which: str, load: Load, name: str, command: str
) -> results.Record:
    """Share of the traced steps in which the device was idle; `untraced`: milliseconds of a step without profiler."""
    drained = timeline.drained_share(start, end)
    idle, num_steps = timeline.idle_share(start, end), len(timeline.steps) - SKIPPED_STEPS - 1
    traced = (end - start) / num_steps / 1e3
    print(
        f"  {which}: idle {idle:.2%} of a traced step of {traced:.3f} ms (nothing queued {drained:.2%}), "
        f"which takes {untraced:.3f} ms untraced"
    )
    return results.measured(
        f"device idle share of a decode step, overlap {which}, batch {load.batch} ({name})",
        part="2",
        unit="",
        value=idle,
        target=IDLE_TARGET if which == "on" else None,
        higher_is_better=False,
        command=command,
        samples=[
            {"nothing_queued": drained, "traced_ms": traced, "busy_ms": (1 - idle) * traced, "untraced_ms": untraced}
        ],
    )


def without_files(arguments: list[str]) -> list[str]:
    """The arguments that a result depends on: where traces and pictures go is of this machine only."""
    kept: list[str] = []
    previous = ""
    for argument in arguments:
        if previous not in FILE_OPTIONS and argument.partition("=")[0] not in FILE_OPTIONS:
            kept.append(argument)
        previous = argument
    return kept


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="deepinfer bench overlap",
        description=__doc__,
        epilog="Examples: `deepinfer bench overlap --device cuda`, "
        "`deepinfer bench overlap --device cuda --synthetic v41 --picture overlap.svg`",
    )
    add_model_options(parser)
    parser.add_argument("--batch", type=int, default=64, help="running sequences (default 64)")
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens of a prompt (default 128)")
    parser.add_argument("--steps", type=int, default=50, help="decode steps of a round (default 50)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both engines, alternating (default 5)")
    parser.add_argument("--no-cuda-graphs", action="store_true", help="launch every kernel by itself")
    parser.add_argument("--traces", type=Path, help="folder for the two traces, small and gzipped")
    parser.add_argument("--picture", type=Path, help="SVG file for the timeline of three steps")
    parser.add_argument("--quick", action="store_true", help="one short round; nothing is saved but traces and picture")
    options = parser.parse_args(arguments)
    if min(options.batch, options.prompt_len, options.steps, options.rounds) < 1:
        parser.error("--batch, --prompt-len, --steps and --rounds must be at least 1")
    command = " ".join(["deepinfer bench overlap", *without_files(arguments)])
    load = Load(options.batch, options.prompt_len, options.rounds, options.steps)
    load.cuda_graphs = False if options.no_cuda_graphs else None
    if options.quick:
        load.rounds, load.steps = 1, min(load.steps, 5)
    model = benchmark_model(options.model, options.device, options.synthetic, options.layers, options.experts)
    records, timelines = measure(model, model_name(options), load, options.device, command)
    for record in records:
        ratio = "" if record.ratio is None else f", {record.ratio:.3f} x {record.baseline_name}"
        print(f"{record.name}: {record.value:,.4g} {record.unit}{ratio}")
    panels = dict(zip(("overlap off", "overlap on"), timelines, strict=True))
    if options.traces:
        for title, timeline in panels.items():
            timeline.save(options.traces / f"{title.replace(' ', '-')}.json.gz")
    if options.picture:
        options.picture.write_text(draw(panels))
    if not options.quick:
        print(f"wrote {results.save(AREA, records)}")
