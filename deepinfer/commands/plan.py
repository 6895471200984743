"""`deepinfer plan`: does a model fit on these GPUs, and how many sequences beside it?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer.commands import options
from deepinfer.commands.units import format_bytes, parse_bytes, parse_count

if TYPE_CHECKING:
    from deepinfer.config.model import ModelConfig
    from deepinfer.models.plan import DeploymentPlan

MOST_GPUS = 256


def register(app: typer.Typer) -> None:
    app.command(
        epilog=options.examples(
            "deepinfer plan nano",
            "deepinfer plan DeepSeek-V4.1-Flash --gpus 8 --gpu-memory 141GB --context 32K",
            "deepinfer plan ./my-checkpoint --gpus 4 --json",
        ),
    )(plan)


def plan(
    model: Annotated[str, typer.Argument(help="nano, DeepSeek-V4.1-Flash, a checkpoint folder or a config.json.")],
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Number of GPUs.")] = 1,
    gpu_memory: Annotated[str, typer.Option(help="Memory of one GPU, e.g. 141GB or 80GiB.")] = "141GB",
    context: Annotated[
        str | None, typer.Option(help="Tokens of a sequence, e.g. 8192 or 32K; default: 32K at most.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="fp8, bf16 or fp32.")] = "fp8",
    memory_utilization: Annotated[float, typer.Option(help="Part of the memory for weights and caches.")] = 0.9,
    json_output: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Bytes of weights, KV bytes a token, and sequences that fit.

    Reads the config only: no weights are needed.  Exits 1 if the model does not fit.
    """
    from deepinfer.models.plan import load_plan_config, plan_deployment

    config = load_plan_config(model)
    make_plan = partial(
        plan_deployment,
        config,
        gpu_memory_bytes=parse_bytes(gpu_memory, "--gpu-memory"),
        context_len=parse_count(context, "--context") if context else min(32 * 1024, config.max_position_embeddings),
        kv_dtype=kv_cache_dtype,
        memory_utilization=memory_utilization,
    )
    deployment = make_plan(num_gpus=gpus)
    if json_output:
        print(json.dumps(asdict(deployment), indent=1))
    else:
        print_plan(model, deployment)
        for note in notes(config, deployment, make_plan):
            print(note)
    raise typer.Exit(0 if deployment.fits else 1)


def notes(config: ModelConfig, plan: DeploymentPlan, make_plan: Callable[..., DeploymentPlan]) -> Iterator[str]:
    """What the figures assume, and what would fit if this does not."""
    if not plan.fits:
        fitting = (count for count in range(1, MOST_GPUS + 1) if make_plan(num_gpus=count).fits)
        fewest = next(fitting, None)
        yield f"Fewest GPUs of this size that hold it: {fewest or f'none up to {MOST_GPUS}'}."
    if plan.num_gpus == 1:
        return
    yield "Experts and Engram tables are split over the GPUs, the rest of the weights is on each."
    yield "The cache of a sequence is on one GPU: the sequences of all GPUs add up (data parallel)."
    yield "Serving on several GPUs is not implemented yet."
    if config.n_routed_experts % plan.num_gpus:
        yield f"{config.n_routed_experts} experts do not divide over {plan.num_gpus} GPUs: some hold one more."


def print_plan(model: str, plan: DeploymentPlan) -> None:
    """The plan as a table, largest questions first."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    parts = {
        "attention, compressors, indexers": plan.attention_weight_bytes,
        "routed experts": plan.routed_expert_weight_bytes,
        "Engram tables": plan.engram_table_weight_bytes,
        "embedding and head": plan.embedding_weight_bytes,
        "draft head": plan.draft_weight_bytes,
        "image tower": plan.vision_weight_bytes,
        "other": plan.other_weight_bytes,
    }
    rows = [
        ("parameters", f"{plan.parameters:,}"),
        ("  active for a decoded token", f"{plan.active_parameters_per_decode_token:,}"),
        ("  active for a prompt token", f"{plan.active_parameters_per_prefill_token:,}"),
        ("weights", format_bytes(plan.weight_bytes)),
        *((f"  {name}", format_bytes(size)) for name, size in parts.items() if size),
        ("weights on each GPU", format_bytes(plan.weight_bytes_per_gpu)),
        ("KV cache a token", f"{plan.kv_bytes_per_token:,} B"),
        ("state a sequence", format_bytes(plan.state_bytes_per_sequence)),
        (f"cache of a sequence of {plan.context_len:,} tokens", format_bytes(plan.cache_bytes_per_sequence)),
        ("memory left for caches on each GPU", format_bytes(plan.free_bytes_per_gpu)),
        (f"sequences of {plan.context_len:,} tokens that fit", f"{plan.sequences:,}"),
        ("longest single sequence", f"{plan.longest_sequence_tokens:,} tokens"),
        ("work of a decoded token", f"{plan.flops_per_decode_token / 1e9:,.2f} GFLOP"),
        ("work of a prompt token", f"{plan.flops_per_prefill_token / 1e9:,.2f} GFLOP"),
        ("weights read for a decoded token, batch 1", format_bytes(plan.weight_bytes_read_per_decode_token)),
    ]
    for row in rows:
        table.add_row(*row)
    verdict = "[green]fits[/]" if plan.fits else "[red]does not fit[/]"
    console = Console(highlight=False)
    console.print(f"{model} on {plan.num_gpus} x {format_bytes(plan.gpu_memory_bytes)}: {verdict}\n", table)
