"""`deepinfer bench throughput`: the engine beside `transformers` `generate()`, models of one shape, the same requests.

Each system runs in its own process (same threads, FP32 arithmetic); measurements alternate between the two, and medians
are compared. `transformers` gets the fastest of its expert implementations, and for many requests the faster of one
left-padded batch and sub-batches of similar output length.

With --device cuda, --synthetic or --engine-only the engine runs alone: prefill and decode rates of one batch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from deepinfer.bench import results
from deepinfer.bench.decode import add_model_options, engine_throughput
from deepinfer.bench.workloads import workload

AREA = "cpu_throughput"
ENGINE_AREA = "engine_throughput"
EXPERTS = ("grouped_mm", "eager")


@dataclass(frozen=True)
class Comparison:
    """One workload, and what the plan asks of it."""

    workload: str
    name: str
    target: float
    batching: tuple[str, ...]  # of the baseline


COMPARISONS: tuple[Comparison, ...] = (
    Comparison("batch1", "batch 1, prompt 128, output 128", 2.0, ("one-batch",)),
    Comparison("mixed32", "32 requests, prompts 16-512, outputs 16-256", 4.0, ("one-batch", "sub-batches")),
)
QUICK: tuple[Comparison, ...] = (
    Comparison("quick-batch1", "quick: batch 1", 2.0, ("one-batch",)),
    Comparison("quick-mixed", "quick: 4 requests", 4.0, ("one-batch",)),
)


@dataclass
class Worker:
    """A system in its own process."""

    system: str
    process: Any = field(init=False)
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", "deepinfer.bench.worker", self.system]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, name: str, variant: str = "") -> float:
        """Seconds of one run of workload `name`."""
        self.process.stdin.write(json.dumps({"workload": name, "variant": variant}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(f"bench throughput: the {self.system} process ended, its message is above")
        answer = json.loads(line)
        self.peak_bytes = answer["peak_bytes"]
        return answer["seconds"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def compare(ours: Worker, theirs: Worker, comparison: Comparison, repeats: int, command: str) -> results.Record:
    """Alternate the two systems on one workload; the record's values are output tokens per second."""
    tokens = workload(comparison.workload).num_output_tokens
    variants = [f"{experts}/{batching}" for batching in comparison.batching for experts in EXPERTS]
    trials = {variant: theirs.run(comparison.workload, variant) for variant in variants}
    best = min(trials, key=lambda variant: trials[variant])
    for variant, seconds in trials.items():
        print(f"  transformers {variant}: {tokens / seconds:.1f} tok/s" + (" (baseline)" if variant == best else ""))
    ours.run(comparison.workload)
    samples: list[dict[str, float]] = []
    for _ in range(repeats):
        our_seconds, their_seconds = ours.run(comparison.workload), theirs.run(comparison.workload, best)
        samples.append({"deepinfer": tokens / our_seconds, "transformers": tokens / their_seconds})
        print("  " + ", ".join(f"{system} {rate:.1f} tok/s" for system, rate in samples[-1].items()))
    return results.measured(
        f"CPU output tokens per second, {comparison.name}",
        part="1",
        unit="tok/s",
        value=median(sample["deepinfer"] for sample in samples),
        baseline_name=f"transformers generate(), {best}",
        baseline_value=median(sample["transformers"] for sample in samples),
        target=comparison.target,
        command=command,
        samples=samples,
    )


def memory_record(ours: Worker, theirs: Worker, last: Comparison, command: str) -> results.Record:
    """Peak resident memory of both processes, up to and with workload `last`."""
    return results.measured(
        f"CPU peak memory, {last.name}",
        part="1",
        unit="MiB",
        value=ours.peak_bytes / 2**20,
        baseline_name="transformers generate()",
        baseline_value=theirs.peak_bytes / 2**20,
        target=1.0,
        higher_is_better=False,
        command=command,
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="deepinfer bench throughput",
        description=__doc__,
        epilog="Examples: `deepinfer bench throughput` (needs the dev extra), "
        "`deepinfer bench throughput --device cuda --synthetic v41 --layers 8`",
    )
    parser.add_argument("--repeats", type=int, default=3, help="alternating measurements of each workload (default 3)")
    names = [comparison.workload for comparison in COMPARISONS]
    parser.add_argument("--workload", choices=names, help="only this one (default: all)")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; nothing is saved")
    add_model_options(parser)
    parser.add_argument("--engine-only", action="store_true", help="no baseline: the engine alone, on one batch")
    parser.add_argument("--batch", type=int, default=64, help="sequences at once, engine alone (default 64)")
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens of a prompt, engine alone (default 128)")
    parser.add_argument("--output-len", type=int, default=64, help="decode steps, engine alone (default 64)")
    options = parser.parse_args(arguments)
    if min(options.repeats, options.batch, options.prompt_len, options.output_len) < 1:
        parser.error("--repeats, --batch, --prompt-len and --output-len must be at least 1")
    command = " ".join(["deepinfer bench throughput", *arguments])
    if options.engine_only or options.synthetic or options.device != "cpu":
        report(engine_throughput(options, command), None if options.quick else ENGINE_AREA)
        return
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("bench throughput needs transformers: pip install -e '.[dev]' (or make install-dev)")
    comparisons = QUICK if options.quick else COMPARISONS
    if options.workload and not options.quick:
        comparisons = tuple(c for c in COMPARISONS if c.workload == options.workload)
    ours, theirs = Worker("deepinfer"), Worker("transformers")
    records = []
    try:
        for comparison in comparisons:
            print(comparison.name)
            records.append(compare(ours, theirs, comparison, 1 if options.quick else options.repeats, command))
        records.append(memory_record(ours, theirs, comparisons[-1], command))
    finally:
        ours.close()
        theirs.close()
    report(records, None if options.quick else AREA)


def report(records: list[results.Record], area: str | None) -> None:
    """Print the records, and keep them in an area of benchmarks/results."""
    for record in records:
        ratio = "" if record.ratio is None else f", {record.ratio:.2f} x {record.baseline_name}"
        print(f"{record.name}: {record.value:,.1f} {record.unit}{ratio}")
    if area is not None:
        print(f"wrote {results.save(area, records)}")
