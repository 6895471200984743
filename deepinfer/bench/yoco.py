"""`deepinfer bench yoco`: what YoCo truncation saves of a long prefill.

One prompt of random tokens through the engine with truncation `off` and `compact`, alternating; nano's shape with
random weights, which do not change the work. Peak memories come from one fresh process a mode.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median

import torch

from deepinfer.bench import results
from deepinfer.bench.worker import peak_bytes
from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import ModelConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import resolve_model
from deepinfer.engine.runner import ModelRunner, compute_dtype
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.random_weights import random_weights
from deepinfer.params import SamplingParams

AREA = "yoco"
TARGET = 0.62
MODES = ("off", "compact")


def make_model(device: str) -> DeepseekV41:
    """Nano's shape with random weights and an arbitrary Engram token map."""
    config = ModelConfig.from_file(resolve_model("nano"))
    dtype = compute_dtype(EngineConfig(device=device))
    weights = {name: weight.to(device) for name, weight in random_weights(config, 0, dtype).items()}
    token_map = torch.arange(config.vocab_size) % max(config.engram_compressed_vocab_size, 1)
    return DeepseekV41(config, weights, token_map)


def make_engine(model: DeepseekV41, mode: str, prompt_len: int, device: str) -> Engine:
    """An engine for one sequence that keeps as few tokens as the model allows."""
    config = EngineConfig(
        max_num_seqs=1,
        max_model_len=prompt_len + 1,
        device=device,
        yoco_prefill_truncation_mode=mode,
        yoco_prefill_keep_tokens=sum(model.yoco_window or ()),
    )
    return Engine(ModelRunner(model, config), config)


def prefill_seconds(engine: Engine, prompt_len: int, seed: int) -> float:
    """Arrival to first token of one prompt of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(3, engine.runner.vocab_size, (prompt_len,), generator=generator).tolist()
    started = time.perf_counter()
    engine.add_request(str(seed), prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()  # drawing the token waits for the device
    return time.perf_counter() - started


def measure_time(prompt_len: int, repeats: int, device: str, command: str) -> results.Record:
    """Alternating prefills of all modes, after one of each that warms up; medians are compared."""
    model = make_model(device)
    engines = {mode: make_engine(model, mode, prompt_len, device) for mode in MODES}
    for engine in engines.values():
        prefill_seconds(engine, min(prompt_len, 1024), seed=0)
    samples = []
    for seed in range(1, repeats + 1):
        samples.append({mode: prefill_seconds(engine, prompt_len, seed) for mode, engine in engines.items()})
        print("  " + ", ".join(f"{mode} {seconds:.2f} s" for mode, seconds in samples[-1].items()), flush=True)
    return results.measured(
        f"prefill of {prompt_len} tokens, YoCo compact",
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


def peak_memory(mode: str, prompt_len: int, device: str) -> int:
    """Peak bytes of a process that does one prefill: resident on a CPU, allocated on a GPU."""
    prefill_seconds(make_engine(make_model(device), mode, prompt_len, device), prompt_len, seed=1)
    return torch.cuda.max_memory_allocated() if torch.device(device).type == "cuda" else peak_bytes()


def measure_memory(prompt_len: int, device: str, command: str) -> results.Record:
    """Peak memory of both modes, each in a process of its own."""
    peaks = {}
    for mode in MODES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            peaks[mode] = pool.submit(peak_memory, mode, prompt_len, device).result()
    return results.measured(
        f"peak memory of a prefill of {prompt_len} tokens, YoCo compact",
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


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="deepinfer bench yoco",
        description=__doc__,
        epilog="Examples: `deepinfer bench yoco`, `deepinfer bench yoco --device cuda --repeats 5`",
    )
    parser.add_argument("--prompt-len", type=int, default=8192, help="tokens of the prompt (default 8192)")
    parser.add_argument("--repeats", type=int, default=3, help="alternating prefills of each mode (default 3)")
    parser.add_argument("--device", default="cpu", help="torch device (default cpu)")
    parser.add_argument("--quick", action="store_true", help="one repeat, no memory; nothing is saved")
    options = parser.parse_args(arguments)
    if min(options.prompt_len, options.repeats) < 1:
        parser.error("--prompt-len and --repeats must be at least 1")
    command = " ".join(["deepinfer bench yoco", *arguments])
    records = [measure_time(options.prompt_len, 1 if options.quick else options.repeats, options.device, command)]
    if not options.quick:
        records.append(measure_memory(options.prompt_len, options.device, command))
    for record in records:
        print(f"{record.name}: {record.value:.2f} {record.unit}, {record.ratio:.3f} x {record.baseline_name}")
    if not options.quick:
        print(f"wrote {results.save(AREA, records)}")
