"""`deepinfer bench host`: what a decode step costs on the CPU beside the model, and whether anything grows.

The engine runs over a runner that has no model: it returns the same logits at every step.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer.bench.results import Record, measured, median_of
from deepinfer.config.engine import EngineConfig
from deepinfer.config.speculative import SpeculativeConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.mtp_info import MTPInfoPool
from deepinfer.engine.output_pool import NewOutputs, RequestOutputPool
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.sequence_metadata import SequenceMetadataPool
from deepinfer.engine.swap import CacheRows
from deepinfer.models.inputs import ModelInputs
from deepinfer.models.plan import load_plan_config
from deepinfer.observability.flops import FlopsEstimator
from deepinfer.outputs import RequestMetrics
from deepinfer.params import SamplingParams

TARGET_MS = 1.0
PARTS = ("schedule", "inputs", "postprocess", "observe")  # the sampler runs where the logits are: reported apart
PROMPT_LEN = 512
MAKERS = (NewOutputs, RequestOutputPool)
NUM_DRAFTS = 5


class NoModel:
    """A runner without a model; FLOPs are estimated as for the released model, because that is part of the cost."""

    def __init__(self, num_rows: int, vocab_size: int, num_blocks: int) -> None:
        self.vocab_size, self.num_blocks, self.max_model_len = vocab_size, num_blocks, 1 << 20
        self.flops = FlopsEstimator(load_plan_config("DeepSeek-V4.1-Flash"))
        self._logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))

    def run(self, inputs: ModelInputs) -> Tensor:
        return self._logits[: len(inputs.logits_rows)]

    def cache_rows(self) -> CacheRows:
        raise ValueError("a runner without a model has no caches to swap")


def make_engine(
    num_seqs: int, vocab_size: int, tokens_a_sequence: int, overlapped: bool = False, num_drafts: int = 0
) -> Engine:
    """With `num_drafts` every step verifies so many of each sequence, which prompt lookup finds."""
    lookup = None
    if num_drafts:
        lookup = SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts, variable_length=False)
    blocks = num_seqs * -(-tokens_a_sequence // EngineConfig.block_size) + 2
    config = EngineConfig(
        max_num_seqs=num_seqs,
        num_blocks=blocks,
        watermark=0.0,
        max_num_batched_tokens=8192,
        zero_overhead_scheduling=overlapped,
        speculative_config=lookup,
    )
    return Engine(NoModel(num_seqs * (1 + num_drafts), vocab_size, blocks), config)


@dataclass
class StepCost:
    """Milliseconds, medians over the steps of one run."""

    parts: dict[str, float]  # by part of the step, PARTS and "sample"

    @property
    def host(self) -> float:
        """Scheduling, input building, post-processing and statistics."""
        return sum(self.parts[name] for name in PARTS)


def step_cost(num_seqs: int, num_steps: int, params: SamplingParams, vocab_size: int, num_drafts: int = 0) -> StepCost:
    """Medians over `num_steps` decode steps of `num_seqs` sequences, after their prefill."""
    engine = make_engine(num_seqs, vocab_size, PROMPT_LEN + (num_steps + 100) * (1 + num_drafts), False, num_drafts)
    for number in range(num_seqs):
        engine.add_request(str(number), [5] * PROMPT_LEN, params)
    while engine.scheduler.waiting or engine.scheduler.prefilling or engine.scheduler.prompted:
        engine.step()
    engine.observer.timer.enabled = True
    for _ in range(num_steps):
        engine.step()
    times = engine.observer.timer.summary()
    for number in range(num_seqs):
        engine.abort_request(str(number))
    return StepCost({name: times[name].median * 1e3 for name in (*PARTS, "sample")})


def assembly_microseconds(make: NewOutputs, num_seqs: int, num_steps: int) -> float:
    """Median microseconds of making one step's outputs, one token of each of `num_seqs` requests."""
    ids, prompt, metrics = [str(number) for number in range(num_seqs)], [5], RequestMetrics(0.0)
    samples, outputs = [], []
    for _ in range(num_steps):
        start = time.perf_counter_ns()
        make.next_round()
        outputs = [make.output(i, prompt, make.completion(0, [7], None, None, None), metrics) for i in ids]
        samples.append(time.perf_counter_ns() - start)
    assert len(outputs) == num_seqs
    return statistics.median(samples) / 1e3


def metadata_microseconds(kept: bool, num_seqs: int, num_drafts: int, num_steps: int) -> float:
    """Median microseconds of what a step with drafts is told of its sequences: block tables, parameters and rows.

    Pools are `kept` from step to step, or filled anew in each.
    """
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=1)
    sequences = [Sequence("r", 0, n, [5] * PROMPT_LEN, params, n, RequestMetrics(0.0)) for n in range(num_seqs)]
    for seq in sequences:
        seq.state_slot, seq.next_drafts = seq.arrival + 1, [7] * num_drafts
        seq.block_table.extend(range(1, PROMPT_LEN // EngineConfig.block_size + 2))
    counts = [num_drafts] * num_seqs
    block_tables = np.empty((num_seqs * (1 + num_drafts), 256), np.int32)
    counters = np.zeros(len(block_tables), np.int64)

    def new_pools() -> tuple[SequenceMetadataPool, MTPInfoPool]:
        return SequenceMetadataPool(num_seqs + 1, 8192), MTPInfoPool(num_seqs + 1, num_drafts)

    samples, pools = [], new_pools()
    for _ in range(num_steps):
        start = time.perf_counter_ns()
        if not kept:
            pools = new_pools()
        metadata, infos = pools
        slots = metadata.take(sequences)
        of_rows = np.repeat(slots, 1 + num_drafts)
        metadata.write_block_tables(of_rows, block_tables)
        metadata.parameters(of_rows, counters, infos.rows(sequences, slots.tolist(), counts))
        samples.append(time.perf_counter_ns() - start)
    return statistics.median(samples) / 1e3


@dataclass
class MemorySample:
    step: int
    traced_bytes: int  # allocated by Python code, NumPy arrays included
    resident_bytes: int  # of the process; 0 where it cannot be read


def steady_load(
    num_seqs: int, num_steps: int, num_samples: int, vocab_size: int = 64, overlapped: bool = False
) -> list[MemorySample]:
    """Memory while finished requests are replaced by new ones, sampled right after a collection.

    Outputs come from a pool, as in the engine process.
    """
    engine = make_engine(num_seqs, vocab_size, 400, overlapped)
    engine.outputs = RequestOutputPool()
    samples, number, alive = [], 0, 0
    tracemalloc.start()
    try:
        for step in range(1, num_steps + 1):
            while alive < num_seqs:
                # Lengths differ, so that arrivals, prefills and ends mix with decoding.
                params = SamplingParams(temperature=0, max_tokens=60 + number % 97, ignore_eos=True)
                engine.add_request(str(number), [5] * (20 + number % 130), params)
                number, alive = number + 1, alive + 1
            alive -= sum(output.finished for output in engine.step())
            if step % (num_steps // num_samples) == 0:
                gc.collect()
                samples.append(MemorySample(step, tracemalloc.get_traced_memory()[0], resident_bytes()))
    finally:
        tracemalloc.stop()
        for request_id in list(engine.requests):
            engine.abort_request(request_id)
    return samples


def growth(samples: list[MemorySample]) -> tuple[int, int]:
    """(traced, resident) bytes from the second to the last quarter, medians; the first quarter is warming up."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]

    def gain(field: str) -> int:
        return round(
            statistics.median(getattr(s, field) for s in late) - statistics.median(getattr(s, field) for s in early)
        )

    return gain("traced_bytes"), gain("resident_bytes")


def resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    import resource

    return pages * resource.getpagesize()


def measure(num_seqs: int, num_steps: int, repeats: int, growth_steps: int, command: str) -> list[Record]:
    """Print the cost of each part while measuring; medians over `repeats` runs."""
    torch.set_num_threads(1)
    greedy = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=100_000, ignore_eos=True)
    kinds = {"greedy": (greedy, 0), "top_p 0.9": (drawn, 0), f"{NUM_DRAFTS} drafts each": (greedy, NUM_DRAFTS)}
    cost = partial(median_of, part="2", unit="ms", higher_is_better=False, command=command)
    records = []
    step_cost(num_seqs, 50, greedy, 8192)  # warms up
    for kind, (params, num_drafts) in kinds.items():
        runs = [step_cost(num_seqs, num_steps, params, 8192, num_drafts) for _ in range(repeats)]
        medians = {name: statistics.median(run.parts[name] for run in runs) for name in (*PARTS, "sample")}
        print(f"{kind}: " + ", ".join(f"{name} {value:.3f} ms" for name, value in medians.items()), flush=True)
        records.append(
            cost(
                f"decode step on the CPU without model and sampler, {kind} ({num_seqs} sequences)",
                [run.host for run in runs],
                target=TARGET_MS,
            )
        )
        name = f"sampler on the CPU, {kind} ({num_seqs} sequences, vocabulary of 8192)"
        records.append(cost(name, [run.parts["sample"] for run in runs]))
    pooled = {
        f"outputs of a step from RequestOutputPool ({num_seqs} sequences)": (
            "new objects",
            [[assembly_microseconds(make(), num_seqs, num_steps) for make in MAKERS] for _ in range(repeats)],
        ),
        f"metadata of a step from SequenceMetadataPool and MTPInfoPool ({num_seqs} sequences, {NUM_DRAFTS} drafts)": (
            "gathered anew",
            [
                [metadata_microseconds(kept, num_seqs, NUM_DRAFTS, num_steps) for kept in (False, True)]
                for _ in range(repeats)
            ],
        ),
    }
    for name, (baseline, pairs) in pooled.items():
        without, with_pool = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name}: {with_pool:.1f} us, {baseline} {without:.1f} us")
        records.append(
            measured(
                name,
                part="2",
                unit="us",
                value=with_pool,
                baseline_name=baseline,
                baseline_value=without,
                target=1.0,
                higher_is_better=False,
                samples=pairs,
                command=command,
            )
        )
    if growth_steps:
        samples = steady_load(num_seqs, growth_steps, num_samples=40)
        traced, resident = growth(samples)
        for what, value, target in (("Python", traced, 64), ("resident", resident, 4096)):
            print(f"{what} memory grew by {value / 1024:.1f} KiB from the second to the last quarter")
            records.append(
                measured(
                    f"growth of {what} memory over {growth_steps} steps",
                    part="2",
                    unit="KiB",
                    value=value / 1024,
                    target=target,
                    higher_is_better=False,
                    command=command,
                    samples=[getattr(s, "traced_bytes" if what == "Python" else "resident_bytes") for s in samples],
                )  # fmt: skip
            )
    return records
