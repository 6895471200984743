"""Batches of one shape through the engine: prefill them, decode a number of steps, time both."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from deepinfer.bench import results
from deepinfer.bench.synthetic import SHAPES, benchmark_engine, benchmark_model
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.params import SamplingParams

WARM_UP_STEPS = 5


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model, --synthetic, --layers, --experts and --device, as `benchmark_model` takes them."""
    parser.add_argument("--model", default="nano", help="nano or a checkpoint folder (default nano)")
    parser.add_argument("--synthetic", choices=SHAPES, help="random weights of this shape instead of --model")
    parser.add_argument("--layers", type=int, default=8, help="layers of a synthetic model (default 8; v41 has 40)")
    parser.add_argument("--experts", type=int, help="routed experts of a synthetic model (default: the shape's own)")
    parser.add_argument("--device", default="cpu", help="torch device (default cpu)")


def model_name(options: argparse.Namespace) -> str:
    """How a record names the model of `add_model_options`."""
    if options.synthetic is None:
        return options.model
    experts = f", {options.experts} experts" if options.experts else ""
    return f"{options.synthetic} shape, {options.layers} layers{experts}"


def synchronize(device: str) -> None:
    """Wait for a GPU; nothing on a CPU."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def add_requests(engine: Engine, batch: int, prompt_len: int, max_tokens: int, seed: int = 0) -> None:
    """`batch` greedy requests of random tokens, all of one length."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, engine.runner.vocab_size, (batch, prompt_len), generator=generator)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts.tolist()):
        engine.add_request(f"{seed}-{number}", prompt, params)


def step(engine: Engine) -> bool:
    """One step; True if a request ended. Raises ValueError if one failed: nothing would be left to measure."""
    outputs = engine.step()
    for output in outputs:
        if output.error is not None:
            raise ValueError(f"bench: a request failed: {output.error}")
    return any(output.finished for output in outputs)


def prefill(engine: Engine) -> None:
    """Step until every request decodes. Raises ValueError if they do not fit at once."""
    scheduler = engine.scheduler
    while scheduler.waiting or scheduler.prefilling or scheduler.prompted:
        if step(engine):
            raise ValueError("bench: the batch does not fit into the cache at once")


def decode(engine: Engine, num_steps: int) -> float:
    """Seconds a step of `num_steps` steps, from an idle device to an idle device."""
    device = engine.config.device
    synchronize(device)
    started = time.perf_counter()
    for _ in range(num_steps):
        step(engine)
    synchronize(device)
    return (time.perf_counter() - started) / num_steps


def abort_all(engine: Engine) -> None:
    for request_id in list(engine.requests):
        engine.abort_request(request_id)
    engine.step()  # what is in flight comes back


@dataclass
class Speed:
    """Tokens per second of one batch."""

    prefill: float
    decode: float


def measure_batch(engine: Engine, batch: int, prompt_len: int, num_steps: int, seed: int) -> Speed:
    """Prefill a batch and decode `num_steps` steps of it."""
    add_requests(engine, batch, prompt_len, WARM_UP_STEPS + num_steps + 10, seed)
    synchronize(engine.config.device)
    started = time.perf_counter()
    prefill(engine)
    synchronize(engine.config.device)
    prefilled = time.perf_counter() - started
    decode(engine, WARM_UP_STEPS)
    seconds = decode(engine, num_steps)
    abort_all(engine)
    return Speed(batch * prompt_len / prefilled, batch / seconds)


ATTENTION_KERNELS = ("sparse_attention", "_attend", "_combine")  # Hopper's, and Triton's two


def attention_shares(engine: Engine, batch: int, prompt_len: int, num_steps: int) -> dict[str, float]:
    """Share of the device's working time that attention kernels take, of a batch's prefill and of its decode steps."""
    add_requests(engine, batch, prompt_len, WARM_UP_STEPS + num_steps + 10)
    shares = {}
    for phase, run in (("prefill", partial(prefill, engine)), ("decode", partial(decode, engine, num_steps))):
        synchronize(engine.config.device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            synchronize(engine.config.device)
        times = {event.key: event.self_device_time_total for event in profile.key_averages()}
        shares[phase] = sum(times.get(name, 0.0) for name in ATTENTION_KERNELS) / max(sum(times.values()), 1e-9)
    abort_all(engine)
    return shares


def engine_throughput(options: argparse.Namespace, command: str) -> list[results.Record]:
    """Prefill and decode rates of one model at one batch size; medians over options.repeats runs."""
    model = benchmark_model(options.model, options.device, options.synthetic, options.layers, options.experts)
    max_model_len = options.prompt_len + WARM_UP_STEPS + options.output_len + 10
    config = EngineConfig(max_num_seqs=options.batch, max_model_len=max_model_len, watermark=0.0, device=options.device)
    engine = benchmark_engine(model, config)
    measure_batch(engine, options.batch, options.prompt_len, min(options.output_len, 5), seed=0)  # warms up
    runs = []
    for seed in range(1, options.repeats + 1):
        runs.append(measure_batch(engine, options.batch, options.prompt_len, options.output_len, seed))
        print(f"  prefill {runs[-1].prefill:,.0f} tok/s, decode {runs[-1].decode:,.0f} tok/s", flush=True)
    name = f"{options.batch} sequences, prompt {options.prompt_len} ({model_name(options)})"
    records = [
        results.measured(
            f"{phase} of {name}",
            part="2",
            unit="tok/s",
            value=median(getattr(run, phase) for run in runs),
            command=command,
            samples=[getattr(run, phase) for run in runs],
            device=None if options.device != "cpu" else results.cpu_device_name(),
        )
        for phase in ("prefill", "decode")
    ]
    if options.device == "cpu":
        return records
    shares = attention_shares(engine, options.batch, options.prompt_len, min(options.output_len, 8))
    return records + [
        results.measured(
            f"attention kernels in {phase} of {name}",
            part="4A",
            unit="% of device time",
            value=100 * share,
            command=command,
        )
        for phase, share in shares.items()
    ]
