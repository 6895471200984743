"""`deepinfer bench yoco`: what YoCo truncation saves of a long prefill.

One prompt of random tokens through the engine with truncation `off` and `compact`, alternating. Peak memories come from
one fresh process a mode.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median

import torch

from deepinfer.bench import results
from deepinfer.bench.decode import add_model_options, add_requests, model_name, step, synchronize
from deepinfer.bench.synthetic import benchmark_engine, benchmark_model, num_blocks
from deepinfer.bench.worker import peak_bytes
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.models.registry import Model

AREA = "yoco"
TARGET = 0.62
MODES = ("off", "compact")


def make_model(options: argparse.Namespace) -> Model:
    return benchmark_model(options.model, options.device, options.synthetic, options.layers, options.experts)


def make_engine(model: Model, mode: str, options: argparse.Namespace) -> Engine:
    """An engine for one sequence that keeps as few tokens as the model allows."""
    config = EngineConfig(
        max_num_seqs=1,
        max_model_len=options.prompt_len + 2,
        num_blocks=num_blocks(1, options.prompt_len + 2),  # two engines share the device
        device=options.device,
        prefill_chunk_size=options.chunk,
        max_num_batched_tokens=max(options.chunk, 2048),
        yoco_prefill_truncation_mode=mode,
        yoco_prefill_keep_tokens=sum(model.yoco_window or ()),
    )
    return benchmark_engine(model, config)


def prefill_seconds(engine: Engine, prompt_len: int, seed: int) -> float:
    """Arrival to first token of one prompt of random tokens."""
    device = engine.config.device
    synchronize(device)
    started = time.perf_counter()
    add_requests(engine, 1, prompt_len, 1, seed)
    while engine.has_unfinished_requests():
        step(engine)
    synchronize(device)
    return time.perf_counter() - started


def description(options: argparse.Namespace) -> str:
    """Nano is what older results mean when they name no model."""
    nano = options.synthetic is None and options.model == "nano"
    return f"{options.prompt_len} tokens, YoCo compact" + ("" if nano else f" ({model_name(options)})")


def measure_time(options: argparse.Namespace, repeats: int, command: str) -> results.Record:
    """Alternating prefills of all modes, after one of each that warms up; medians are compared."""
    model = make_model(options)
    engines = {mode: make_engine(model, mode, options) for mode in MODES}
    # A GPU compiles kernels and fills its allocator for every length of a chunk; a CPU has little to warm up.
    warm_up = min(options.prompt_len, 1024) if options.device == "cpu" else options.prompt_len
    for engine in engines.values():
        prefill_seconds(engine, warm_up, seed=0)
    samples = []
    for seed in range(1, repeats + 1):
        samples.append({mode: prefill_seconds(engine, options.prompt_len, seed) for mode, engine in engines.items()})
        print("  " + ", ".join(f"{mode} {seconds:.3f} s" for mode, seconds in samples[-1].items()), flush=True)
    return results.measured(
        f"prefill of {description(options)}",
        part="2",
        unit="s",
        value=median(sample["compact"] for sample in samples),
        baseline_name="off",
        baseline_value=median(sample["off"] for sample in samples),
        target=TARGET,
        higher_is_better=False,
        command=command,
        samples=samples,
    )


def peak_memory(mode: str, options: argparse.Namespace) -> int:
    """Peak bytes of a process that does one prefill: resident on a CPU, allocated on a GPU."""
    prefill_seconds(make_engine(make_model(options), mode, options), options.prompt_len, seed=1)
    return peak_bytes() if options.device == "cpu" else torch.cuda.max_memory_allocated()


def measure_memory(options: argparse.Namespace, command: str) -> results.Record:
    """Peak memory of both modes, each in a process of its own."""
    peaks = {}
    for mode in MODES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            peaks[mode] = pool.submit(peak_memory, mode, options).result()
    return results.measured(
        f"peak memory of a prefill of {description(options)}",
        part="2",
        unit="MiB",
        value=peaks["compact"] / 2**20,
        baseline_name="off",
        baseline_value=peaks["off"] / 2**20,
        target=1.0,
        higher_is_better=False,
        command=command,
        samples=[peaks],
    )


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="deepinfer bench yoco",
        description=__doc__,
        epilog="Examples: `deepinfer bench yoco`, `deepinfer bench yoco --device cuda --synthetic v41 --repeats 5`",
    )
    add_model_options(options)
    options.add_argument("--prompt-len", type=int, default=8192, help="tokens of the prompt (default 8192)")
    options.add_argument("--chunk", type=int, default=512, help="tokens of a prefill step (default 512)")
    options.add_argument("--repeats", type=int, default=3, help="alternating prefills of each mode (default 3)")
    options.add_argument("--no-memory", action="store_true", help="time only: no fresh process for the peak memory")
    options.add_argument("--quick", action="store_true", help="one repeat, no memory; nothing is saved")
    return options


def main(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    if min(options.prompt_len, options.chunk, options.repeats) < 1:
        parser().error("--prompt-len, --chunk and --repeats must be at least 1")
    command = " ".join(["deepinfer bench yoco", *arguments])
    records = [measure_time(options, 1 if options.quick else options.repeats, command)]
    if not (options.quick or options.no_memory):
        records.append(measure_memory(options, command))
    for record in records:
        print(f"{record.name}: {record.value:.3f} {record.unit}, {record.ratio:.3f} x {record.baseline_name}")
    if not options.quick:
        print(f"wrote {results.save(AREA, records)}")
