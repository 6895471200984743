"""`deepinfer bench latency`: time to first token and time per output token of the engine alone, without HTTP."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from deepinfer.bench.results import Record, cpu_device_name, measured
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import load_engine
from deepinfer.params import SamplingParams


@dataclass
class Latency:
    """Milliseconds, medians over the requests of a batch."""

    first_token: float  # TTFT: arrival to first token
    per_token: float  # TPOT: (end - first token) / (tokens - 1)


def run_batch(engine: Engine, batch_size: int, prompt_len: int, output_len: int, seed: int) -> Latency:
    """`batch_size` requests of random tokens that arrive together, greedy, all of `output_len` >= 2 tokens."""
    generator = np.random.default_rng(seed)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    for number in range(batch_size):
        prompt = generator.integers(3, engine.runner.vocab_size, size=prompt_len).tolist()
        engine.add_request(f"{seed}-{number}", prompt, params)
    finished = []
    while engine.has_unfinished_requests():
        finished += [output.metrics for output in engine.step() if output.finished]
    first, later = [], []
    for times in finished:
        assert times.first_token_time is not None and times.finished_time is not None
        first.append(times.first_token_time - times.arrival_time)
        later.append((times.finished_time - times.first_token_time) / (output_len - 1))
    return Latency(statistics.median(first) * 1e3, statistics.median(later) * 1e3)


def measure(
    model: str,
    batch_sizes: list[int],
    prompt_lens: list[int],
    output_len: int,
    repeats: int,
    command: str,
    device: str = "cpu",
) -> list[Record]:
    """Print a table while measuring; medians over `repeats` runs, after one that warms up."""
    if output_len < 2 or repeats < 1 or min(batch_sizes + prompt_lens, default=0) < 1:
        raise ValueError("output_len must be at least 2; repeats, batch sizes and prompt lengths at least 1")
    engine = load_engine(model, EngineConfig(max_num_seqs=max(batch_sizes), device=device))
    run_batch(engine, 1, min(prompt_lens), 2, seed=0)
    if device != "cpu":  # every shape of a step has kernels to compile
        for prompt_len in prompt_lens:
            run_batch(engine, max(batch_sizes), prompt_len, 2, seed=0)
    records = []
    print(f"{'batch':>6} {'prompt':>7} {'TTFT ms':>9} {'TPOT ms':>9} {'tok/s':>9}")
    for prompt_len in prompt_lens:
        for batch_size in batch_sizes:
            runs = [run_batch(engine, batch_size, prompt_len, output_len, seed=seed + 1) for seed in range(repeats)]
            first, later = [run.first_token for run in runs], [run.per_token for run in runs]
            rate = batch_size / statistics.median(later) * 1e3
            medians = f"{statistics.median(first):9.1f} {statistics.median(later):9.2f}"
            print(f"{batch_size:6} {prompt_len:7} {medians} {rate:9.1f}", flush=True)
            for name, samples in (("TTFT", first), ("TPOT", later)):
                records.append(
                    measured(
                        f"{name} ({model}, batch {batch_size}, prompt {prompt_len})",
                        part="1",
                        unit="ms",
                        value=statistics.median(samples),
                        command=command,
                        higher_is_better=False,
                        samples=samples,
                        device=None if device != "cpu" else cpu_device_name(),
                    )
                )
    return records
