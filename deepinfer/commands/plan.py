"""`deepinfer plan`: does a model fit on these GPUs, and how many sequences beside it?"""

import json
from dataclasses import asdict

import typer

from deepinfer.commands import options
from deepinfer.commands.units import format_bytes, parse_bytes, parse_count


def register(app: typer.Typer) -> None:
    app.command(
        epilog=options.examples(
            "deepinfer plan nano --gpus 1",
            "deepinfer plan ./DeepSeek-V4.1-Flash --gpus 8 --gpu-memory 141GB --context 32k",
        ),
    )(plan)


def plan(
    model: str = typer.Argument(..., help="`nano`, a checkpoint folder, or a config.json."),
    gpus: int = typer.Option(1, "--gpus", min=1, help="Number of GPUs."),
    gpu_memory: str = typer.Option("141GB", help="Memory of one GPU, e.g. 141GB or 80GiB."),
    context: str = typer.Option("32k", help="Tokens of one sequence, prompt and answer, e.g. 8192, 25.6k or 32K."),
    json_output: bool = typer.Option(False, "--json", help="Print the plan as JSON."),
) -> None:
    """Bytes of weights, KV bytes a token, and sequences that fit.  Reads the config only: no weights are needed."""
    from deepinfer.models.plan import load_plan_config, plan_deployment

    deployment = plan_deployment(
        load_plan_config(model),
        num_gpus=gpus,
        gpu_memory_bytes=parse_bytes(gpu_memory, "--gpu-memory"),
        context_len=parse_count(context, "--context"),
    )
    values = asdict(deployment)
    if json_output:
        print(json.dumps(values, indent=1))
        return
    for name, value in values.items():
        shown = format_bytes(value) if name.endswith("bytes") or "_bytes_" in name else value
        print(f"{name.replace('_', ' '):36} {shown}")
