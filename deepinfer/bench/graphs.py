"""`deepinfer bench graphs`: what CUDA graphs cost at start-up and gain in every decode step.

The same padded steps are timed as replays and launched kernel by kernel, on one model and one set of caches, with the
cache filled to one context length; so is a chunk of a long prompt. Neither sampling nor scheduling is in these times.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from deepinfer.bench import results
from deepinfer.bench.decode import add_model_options, model_name
from deepinfer.bench.synthetic import benchmark_model
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.cuda_graph import DecodeGraphs
from deepinfer.engine.runner import ModelRunner
from deepinfer.observability.timers import CUDATimer

AREA = "cuda_graphs"


def measure(runner: ModelRunner, name: str, context_len: int, command: str) -> list[results.Record]:
    """Records of capture time and memory, and of a step of every captured size.

    Raises ValueError if there are none.
    """
    graphs, config = runner.graphs, runner.config
    if graphs is None or not graphs.is_captured:
        raise ValueError("--device must be a GPU whose kernels can be captured in CUDA graphs, e.g. cuda")
    eager = DecodeGraphs(
        runner.forward,
        config.max_num_seqs,
        config.cudagraph_batch_size_interval,
        graphs.shapes[-1].blocks,
        config.device,
    )
    sizes = (context_len, config.block_size, runner.num_blocks, runner.vocab_size)
    launched, replayed = eager.step_times(*sizes), graphs.step_times(*sizes, repeats=20)
    what = f"{len(graphs.shapes)} decode graphs of up to {config.max_num_seqs} sequences ({name})"
    records = [
        results.measured(
            f"capture of {what}",
            part="2",
            unit="s",
            value=graphs.cost.seconds,
            higher_is_better=False,
            command=command,
        ),
        results.measured(
            f"memory of {what}",
            part="2",
            unit="MiB",
            value=graphs.cost.num_bytes / 2**20,
            higher_is_better=False,
            command=command,
        ),
    ]
    for batch, milliseconds in replayed.items():
        records.append(
            results.measured(
                f"decode step of {batch} sequences at {context_len} tokens ({name})",
                part="2",
                unit="ms",
                value=milliseconds,
                baseline_name="without graph",
                baseline_value=launched[batch],
                higher_is_better=False,
                command=command,
            )
        )
    return records


def chunk_records(runner: ModelRunner, name: str, command: str) -> list[results.Record]:
    """Records of the graphs of prefill chunks: their capture, and the longest context's chunk with and without."""
    chunks = runner.prefill_graphs
    if chunks is None or not chunks.shapes:
        return []
    shape = max(chunks.shapes, key=lambda shape: (shape.blocks, not shape.is_first))
    block_size, count = runner.config.block_size, chunks.chunk
    start = 0 if shape.is_first else shape.blocks * block_size - count
    inputs = chunks.inputs(shape)
    inputs.token_ids.copy_(torch.arange(count) * 7919 % runner.vocab_size)  # different tokens, different experts
    inputs.positions.copy_(torch.arange(start, start + count))
    inputs.context_lens.fill_(start + count)
    inputs.state_slots.fill_(1)
    inputs.block_tables.copy_(torch.arange(shape.blocks) % (runner.num_blocks - 1) + 1)
    launched = milliseconds(lambda: runner.forward(inputs), repeats=5)
    replayed = milliseconds(lambda: chunks.run(inputs, shape), repeats=20)
    what = f"{len(chunks.shapes)} prefill graphs of {count} tokens ({name})"
    measured = partial(results.measured, part="2", higher_is_better=False, command=command)
    return [
        measured(f"capture of {what}", unit="s", value=chunks.cost.seconds),
        measured(f"memory of {what}", unit="MiB", value=chunks.cost.num_bytes / 2**20),
        measured(
            f"prefill chunk of {count} tokens behind {start} ({name})",
            unit="ms",
            value=replayed,
            baseline_name="without graph",
            baseline_value=launched,
        ),
    ]


@torch.inference_mode()
def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` runs on the device, launches that it waits for included."""
    run()
    timer = CUDATimer()
    for _ in range(repeats):
        with timer.scope("run"):
            run()
    torch.cuda.synchronize()
    return 1e3 * timer.summary()["run"].median


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="deepinfer bench graphs",
        description=__doc__,
        epilog="Example: `deepinfer bench graphs --device cuda --synthetic v41`",
    )
    add_model_options(parser)
    parser.add_argument("--batch", type=int, default=64, help="sequences of the largest step (default 64)")
    parser.add_argument("--context-len", type=int, default=1024, help="tokens of every sequence (default 1024)")
    options = parser.parse_args(arguments)
    if min(options.batch, options.context_len) < 1:
        parser.error("--batch and --context-len must be at least 1")
    config = EngineConfig(
        device=options.device,
        max_num_seqs=options.batch,
        max_model_len=2 * options.context_len,
        cuda_graphs=True,
        cudagraph_batch_size_interval=max(options.batch // 4, 1),
        prefill_chunk_size=max(options.context_len // 2, 2),
    )
    model = benchmark_model(options.model, options.device, options.synthetic, options.layers, options.experts)
    command = " ".join(["deepinfer bench graphs", *arguments])
    runner, name = ModelRunner(model, config), model_name(options)
    records = [*measure(runner, name, options.context_len, command), *chunk_records(runner, name, command)]
    for record in records:
        ratio = "" if record.ratio is None else f", {record.ratio:.3f} x {record.baseline_name}"
        print(f"{record.name}: {record.value:,.4g} {record.unit}{ratio}")
    print(f"wrote {results.save(AREA, records)}")
