"""`deepinfer bench`: measurements that write benchmarks/results, and the table of them."""

import importlib
from pathlib import Path

import typer

from deepinfer.commands import bench_serve
from deepinfer.commands.options import examples, parse_numbers

app = typer.Typer(
    help="Measure this machine, and print what was measured.",
    no_args_is_help=True,
    epilog=examples("deepinfer bench latency", "deepinfer bench throughput --quick", "deepinfer bench report"),
)
bench_serve.register(app)


def _run(module: str, arguments: list[str]) -> None:
    """Hand the remaining arguments to the benchmark's own `main(arguments) -> None`."""
    importlib.import_module(f"deepinfer.bench.{module}").main(arguments)


_FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(
    context_settings=_FORWARD,
    add_help_option=False,
    epilog=examples("deepinfer bench throughput"),
)
def throughput(context: typer.Context) -> None:
    """Tokens per second of the engine, beside `transformers` on a model of the same shape."""
    _run("throughput", context.args)


@app.command(
    context_settings=_FORWARD,
    add_help_option=False,
    epilog=examples("deepinfer bench yoco", "deepinfer bench yoco --device cuda --repeats 5"),
)
def yoco(context: typer.Context) -> None:
    """Time and memory of a long prefill with YoCo truncation, beside the full one."""
    _run("yoco", context.args)


@app.command(
    context_settings=_FORWARD,
    add_help_option=False,
    epilog=examples("deepinfer bench speculation", "deepinfer bench speculation --method dspark --device cuda"),
)
def speculation(context: typer.Context) -> None:
    """Decoding with and without drafts, batch by batch, and how many are accepted."""
    _run("speculation", context.args)


@app.command(
    context_settings=_FORWARD,
    add_help_option=False,
    epilog=examples("deepinfer bench overlap", "deepinfer bench overlap --device cuda --synthetic v41"),
)
def overlap(context: typer.Context) -> None:
    """Decoding with overlapped scheduling on and off, and how long the device is idle."""
    _run("overlap", context.args)


@app.command(
    context_settings=_FORWARD,
    add_help_option=False,
    epilog=examples("deepinfer bench graphs --device cuda", "deepinfer bench graphs --device cuda --synthetic v41"),
)
def graphs(context: typer.Context) -> None:
    """Decode steps as CUDA graphs: what capturing costs, and a step beside one that is launched kernel by kernel."""
    _run("graphs", context.args)


@app.command(epilog=examples("deepinfer bench latency", "deepinfer bench latency --batch-sizes 1,32 --save"))
def latency(
    model: str = typer.Option("nano", help="`nano` or a checkpoint folder."),
    batch_sizes: str = typer.Option("1,8,32", help="Requests at once, comma-separated."),
    prompt_lens: str = typer.Option("128,512", help="Tokens of a prompt, comma-separated."),
    output_len: int = typer.Option(32, min=2, help="Tokens of an answer."),
    repeats: int = typer.Option(3, min=1, help="Measured runs of each; medians are reported."),
    device: str = typer.Option("cpu", help="Torch device, e.g. cpu or cuda."),
    save: bool = typer.Option(False, "--save", help="Write benchmarks/results/latency.json."),
) -> None:
    """Time to first token (TTFT) and per output token (TPOT) of the engine alone."""
    from deepinfer.bench import latency as benchmark
    from deepinfer.bench import results

    sizes, lengths = parse_numbers(batch_sizes, "--batch-sizes"), parse_numbers(prompt_lens, "--prompt-lens")
    command = f"deepinfer bench latency --model {model} --batch-sizes {batch_sizes} --prompt-lens {prompt_lens}"
    command += f" --output-len {output_len} --repeats {repeats} --device {device}"
    records = benchmark.measure(model, sizes, lengths, output_len, repeats, command, device)
    if save:
        print(f"wrote {results.save('latency', records)}")


@app.command(epilog=examples("deepinfer bench host", "deepinfer bench host --growth-steps 100000 --save"))
def host(
    num_seqs: int = typer.Option(60, min=1, help="Running sequences."),
    steps: int = typer.Option(500, min=10, help="Measured decode steps of a run."),
    repeats: int = typer.Option(5, min=1, help="Runs; medians are reported."),
    growth_steps: int = typer.Option(0, min=0, help="Also watch memory for this many steps; 0 does not."),
    save: bool = typer.Option(False, "--save", help="Write benchmarks/results/host_overhead.json."),
) -> None:
    """What a decode step costs on the CPU beside the model."""
    from deepinfer.bench import host_overhead, results

    command = f"deepinfer bench host --num-seqs {num_seqs} --steps {steps} --repeats {repeats}"
    command += f" --growth-steps {growth_steps}"
    records = host_overhead.measure(num_seqs, steps, repeats, growth_steps, command)
    if save:
        print(f"wrote {results.save('host_overhead', records)}")


@app.command(epilog=examples("deepinfer bench overhead", "deepinfer bench overhead --streams 32 --save"))
def overhead(
    model: str = typer.Option("nano", help="`nano` or a checkpoint folder."),
    streams: int = typer.Option(32, min=1, help="Streams at once."),
    tokens: int = typer.Option(100, min=2, help="Tokens of each."),
    rounds: int = typer.Option(5, min=1, help="Runs of both, alternating; medians are reported."),
    every_core: bool = typer.Option(False, "--every-core", help="Also a server whose engine takes every core."),
    save: bool = typer.Option(False, "--save", help="Write benchmarks/results/server_overhead.json."),
) -> None:
    """What the server adds to a step of the engine, beside the offline engine in the same run."""
    from deepinfer.bench import results, server_overhead

    command = f"deepinfer bench overhead --model {model} --streams {streams} --tokens {tokens} --rounds {rounds}"
    command += " --every-core" if every_core else ""
    records = server_overhead.measure(model, streams, tokens, rounds, command, every_core)
    for record in records:
        scatter = f"rounds {min(record.samples):.3f} to {max(record.samples):.3f}"
        print(f"{record.name}: {record.value:.3f} {record.unit} ({scatter})")
    if save:
        print(f"wrote {results.save('server_overhead', records)}")


@app.command(epilog=examples("deepinfer bench structured", "deepinfer bench structured --parts throughput --save"))
def structured(
    model: str = typer.Option("nano", help="`nano` or a checkpoint folder."),
    batch_size: int = typer.Option(32, min=1, help="Requests at once, each with a schema of its own."),
    tokens: int = typer.Option(48, min=2, help="Tokens of each."),
    rounds: int = typer.Option(9, min=1, help="Pairs of runs, their order changing; medians of their ratios count."),
    device: str = typer.Option("cpu", help="Torch device, e.g. cpu or cuda."),
    parts: str = typer.Option("throughput,tpot", help="What to measure: throughput, tpot, backends."),
    synthetic: str | None = typer.Option(None, help="Random weights of this shape, e.g. v41, instead of --model."),
    layers: int = typer.Option(8, min=4, help="Layers of a synthetic model."),
    save: bool = typer.Option(False, "--save", help="Write benchmarks/results/structured.json."),
) -> None:
    """What grammars cost: throughput beside unconstrained requests, and steps of others while bad ones are compiled."""
    from deepinfer.bench import results
    from deepinfer.bench import structured as benchmark

    command = f"deepinfer bench structured --model {model} --batch-size {batch_size} --tokens {tokens}"
    command += f" --rounds {rounds} --device {device} --parts {parts}"
    command += "" if synthetic is None else f" --synthetic {synthetic} --layers {layers}"
    records = benchmark.measure(model, batch_size, tokens, rounds, device, parts, command, synthetic, layers)
    for record in records:
        print(
            f"{record.name}: {record.value:.3f} {record.unit}",
            "" if record.ratio is None else f"({record.ratio:.3f} x)",
        )
    if save:
        print(f"wrote {results.save('structured', records)}")


@app.command(epilog=examples("deepinfer bench tokenise", "deepinfer bench tokenise --rounds 31 --save"))
def tokenise(
    size: float = typer.Option(1.0, min=0.001, help="Megabytes of the message."),
    rounds: int = typer.Option(15, min=1, help="Runs of all three, alternating; medians are reported."),
    save: bool = typer.Option(False, "--save", help="Write benchmarks/results/tokenise.json."),
) -> None:
    """A long prompt to token IDs, beside `tokenizers` and deepseek-recipe in the same run, on two cores."""
    from deepinfer.bench import results
    from deepinfer.bench import tokenise as benchmark

    command = f"deepinfer bench tokenise --size {size:g} --rounds {rounds}"
    records = benchmark.measure(int(size * 1e6), rounds, command)
    for record in records:
        print(f"{record.name}: {1 / (record.ratio or 1):.2f} x faster")
    if save:
        print(f"wrote {results.save('tokenise', records)}")


@app.command(epilog=examples("deepinfer bench kernels", "deepinfer bench kernels --only sampler,top_k --save"))
def kernels(
    only: str = typer.Option("sampler,top_k,compile,experts", help="Groups of kernels; also: streaming."),
    save: bool = typer.Option(False, "--save", help="Write benchmarks/results/kernels.json."),
) -> None:
    """The GPU kernels at the sizes of V4.1-Flash, each beside its baseline and the copy bandwidth."""
    from deepinfer.bench import kernels as benchmark
    from deepinfer.bench import results

    records = benchmark.measure([group.strip() for group in only.split(",")])
    if save:
        print(f"wrote {results.save('kernels', records)}")


@app.command(epilog=examples("deepinfer bench report", "deepinfer bench report nano --update"))
def report(
    area: str = typer.Argument("all", help="File name in benchmarks/results without .json, or `all`."),
    results: Path = typer.Option(Path("benchmarks/results"), help="Folder of the result files."),
    update: bool = typer.Option(False, help="Also rewrite the tables in README.md and docs/*.md."),
    check: bool = typer.Option(False, help="Exit 1 if a table in the documentation differs from the result files."),
) -> None:
    """Print the results table: value, target, baseline, ratio, met or not."""
    from deepinfer.bench.report import print_report, update_documents
    from deepinfer.bench.results import load_all

    known = load_all(results)
    if area != "all" and area not in known:
        raise ValueError(f"area must be one of {', '.join(['all', *known])}, got {area!r}")
    print_report(area, results)
    if update or check:
        changed = update_documents(Path("."), known, write=update)
        print("\n".join(f"{'updated' if update else 'out of date'}: {path}" for path in changed) or "tables up to date")
        raise typer.Exit(1 if check and changed else 0)
