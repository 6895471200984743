"""`deepinfer deepspec`: prepare data for a draft model, train it, measure it, calibrate its confidence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer.commands.options import examples

if TYPE_CHECKING:
    from deepinfer.deepspec.acceptance import Answer

app = typer.Typer(
    help="Train and measure draft models for speculative decoding.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TargetOption = Annotated[str, typer.Option("--target", help="`nano`, a V4.1 checkpoint or a Hugging Face folder.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Length = Annotated[int, typer.Option(min=16, help="Tokens of a row: prompt and answer, cut or padded.")]
Tasks = Annotated[Path, typer.Option(help="Folder with .jsonl files of GSM8K, MATH-500, HumanEval, MBPP, ...")]
Limit = Annotated[int | None, typer.Option(min=1, help="Prompts of each task set; default: all.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longest answer.")]
DraftOption = Annotated[str | None, typer.Option("--draft", help="Folder of the draft; default: the target's head.")]


def _folder(target: str) -> Path:
    from deepinfer.engine.model_path import resolve_model

    return resolve_model(target)


@contextmanager
def _progress(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; gives the function that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(text, total=total)
        yield lambda count: bar.advance(task, count)


def _answers(
    folder: Path, tasks: Path, limit: int | None, temperature: float, max_tokens: int, device: str, out: Path
) -> dict[str, list[Answer]]:
    """The target's answers to every task set, kept in `out` (one file a set and temperature)."""
    from deepinfer.deepspec.answers import Sampling, load_writer, write_answers
    from deepinfer.deepspec.tasks import read_tasks

    found, prompts = {}, read_tasks(tasks, limit)
    writer, sampling = load_writer(folder, device), Sampling(temperature, max_tokens)
    for name, part in prompts.items():
        with _progress(f"answers to {name}", len(part)) as advance:
            ids = [writer.encode(prompt) for prompt in part]
            found[name] = write_answers(out / f"{name}-t{temperature:g}.jsonl", ids, writer.write, sampling, advance)
    return found


@app.command(
    epilog=examples(
        "deepinfer deepspec prepare --target nano --tasks ./tasks --out ./data",
        "deepinfer deepspec prepare --target ./Qwen3-4B --tasks ./tasks --out ./data --cache --device cuda",
    )
)
def prepare(
    tasks: Tasks,
    out: Annotated[Path, typer.Option(help="Answers (and cache) go here; a run that was stopped goes on.")],
    target: TargetOption = "nano",
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.7,
    max_tokens: MaxTokens = 256,
    length: Length = 512,
    limit: Limit = None,
    cache: Annotated[bool, typer.Option("--cache", help="Also store the target's hidden states.")] = False,
    rows_a_shard: Annotated[int, typer.Option(min=1)] = 256,
    device: Device = "cpu",
) -> None:
    """Let the target answer prompts, and store its hidden states if asked to. The size is printed before it starts."""
    from deepinfer.deepspec.rows import cache_bytes, rows_of, write_cache
    from deepinfer.deepspec.targets import load_target

    folder = _folder(target)
    answers = _answers(folder, tasks, limit, temperature, max_tokens, device, out / "answers")
    rows = rows_of([answer for part in answers.values() for answer in part], length)
    print(f"{len(rows)} rows of {length} tokens, {int(rows.counted.sum()):,} written by the target")
    model = load_target(folder, length, device) if cache else None
    if model is not None:
        size = cache_bytes(len(rows), length, model.shape)
        print(
            f"hidden-state cache: {size / 2**20:,.1f} MiB ({size / len(rows) / length:,.0f} bytes a token)", flush=True
        )
        shards = -(-len(rows) // rows_a_shard)
        with _progress("shards", shards) as advance:
            write_cache(out / "cache", rows, model, rows_a_shard, advance)


@app.command(
    epilog=examples(
        "deepinfer deepspec train --target nano --data ./data --algorithm dspark --out ./draft",
        "deepinfer deepspec train --target ./Qwen3-4B --data ./data --algorithm eagle3 --out ./draft --device cuda",
        "torchrun --nproc-per-node 8 -m deepinfer.cli deepspec train ... --device cuda",
        "python -m deepinfer.deepspec.v41_train --help   # the head of a V4.1 checkpoint",
    )
)
def train(
    data: Annotated[Path, typer.Option(help="Folder that `prepare` wrote.")],
    out: Annotated[Path, typer.Option(help="The draft goes here.")],
    target: TargetOption = "nano",
    algorithm: Annotated[str, typer.Option(help="dflash, dspark or eagle3.")] = "dspark",
    steps: Annotated[int, typer.Option(min=1)] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step, of each process.")] = 8,
    anchors: Annotated[int, typer.Option(min=1, help="Blocks of a row.")] = 64,
    block_size: Annotated[int, typer.Option(min=1, help="Drafts of a block.")] = 5,
    num_layers: Annotated[int, typer.Option(min=1)] = 2,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 6e-4,
    gamma: Annotated[float, typer.Option(min=0.1, help="Draft k counts exp(-k / gamma).")] = 4.0,
    noise_token_id: Annotated[int, typer.Option(min=0, help="Stands for the tokens to be drafted.")] = 0,
    length: Length = 512,
    seed: int = 0,
    device: Device = "cpu",
) -> None:
    """Train a draft on the target's answers; hidden states come from the cache if there is one."""
    from deepinfer.deepspec import train as training
    from deepinfer.deepspec.answers import read_answers
    from deepinfer.deepspec.drafts import DraftConfig, build_draft
    from deepinfer.deepspec.losses import LossWeights
    from deepinfer.deepspec.rows import cached_batches, computed_batches, rows_of
    from deepinfer.deepspec.targets import load_target

    files = sorted((data / "answers").glob("*.jsonl"))
    if not files:
        raise ValueError(f"data: no answers in {data}, allowed: a folder that `deepinfer deepspec prepare` wrote")
    options = training.TrainingOptions(steps, batch, anchors, learning_rate, seed=seed, losses=LossWeights(gamma=gamma))
    with training.processes(device) as (rank, ranks):
        model = load_target(_folder(target), length, device)
        config = DraftConfig(algorithm, model.shape, block_size, num_layers, noise_token_id=noise_token_id)
        shards = sorted((data / "cache").glob("*.safetensors"))
        if shards:
            batches = cached_batches(shards, batch, seed, rank, ranks, device)
        else:
            rows = rows_of([answer for file in files for answer in read_answers(file)], length)
            batches = computed_batches(rows, model, batch, seed, rank, ranks)
        draft = build_draft(config, seed).to(device)
        with _progress("steps", steps) as advance:

            def report(step: int, figures: dict[str, float]) -> None:
                advance(1)
                if rank == 0 and (step + 1) % max(steps // 10, 1) == 0:
                    shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
                    print(f"step {step + 1}: {shown}", flush=True)

            figures = training.train(draft, model, batches, options, ranks, report)
        if rank == 0:
            training.save_draft(out, draft, training.record_of(options, ranks, figures))


@app.command(
    epilog=examples(
        "deepinfer deepspec eval --target nano --tasks ./tasks --out ./eval",
        "deepinfer deepspec eval --target ./Qwen3-4B --draft ./draft --tasks ./tasks --out ./eval --temperature 1",
    )
)
def eval(
    tasks: Tasks,
    out: Annotated[Path, typer.Option(help="Answers and figures (eval.json) go here.")],
    target: TargetOption = "nano",
    draft: DraftOption = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    drawn: Annotated[bool, typer.Option("--drawn", help="Draw drafts, not the most likely tokens.")] = False,
    max_tokens: MaxTokens = 256,
    length: Length = 1024,
    limit: Limit = None,
    device: Device = "cpu",
) -> None:
    """Acceptance length and projected speed-up of a draft on each task set."""
    from rich.console import Console
    from rich.table import Table

    from deepinfer.deepspec.evaluate import judge_all, open_draft, step_times, summary
    from deepinfer.deepspec.targets import load_target

    folder = _folder(target)
    answers = _answers(folder, tasks, limit, temperature, max_tokens, device, out)
    model = load_target(folder, length, device)
    loaded = open_draft(model, Path(draft) if draft else folder, length)
    judged = {}
    for name, part in answers.items():
        with _progress(f"drafts of {name}", len(part)) as advance:
            judged[name] = judge_all(model, loaded, part, length, drawn, advance)
    rows = summary(judged, step_times(model, Path(draft) if draft else folder, loaded))
    if not rows:
        raise ValueError("answers: none is long enough to draft in, allowed: at least 2 tokens")
    (out / "eval.json").write_text(json.dumps({"temperature": temperature, "sets": rows}, indent=1) + "\n")
    table = Table("set", "rounds", "accepted length", "accepted by position", "projected speed-up")
    for name, row in rows.items():
        by_position = " ".join(f"{share:.2f}" for share in row["by_position"])
        speed = "-" if row["speed_up"] is None else f"{row['speed_up']:.2f} x"
        table.add_row(name, f"{row['rounds']:,}", f"{row['mean_length']:.2f}", by_position, speed)
    Console().print(table)


@app.command(
    epilog=examples(
        "deepinfer deepspec calibrate --target nano --tasks ./tasks --out ./eval",
        "deepinfer deepspec calibrate --target nano --tasks ./tasks --out ./eval --plot calibration.svg",
    )
)
def calibrate(
    tasks: Tasks,
    out: Annotated[Path, typer.Option(help="Answers go here.")],
    target: TargetOption = "nano",
    draft: DraftOption = None,
    max_tokens: MaxTokens = 256,
    length: Length = 1024,
    limit: Limit = None,
    plot: Annotated[Path | None, typer.Option(help="Reliability diagram (.svg or .png); needs matplotlib.")] = None,
    device: Device = "cpu",
) -> None:
    """Fit the confidence's temperatures on every other answer, and say how good they are on the rest.

    Answers are drawn at temperature 0 and 1. The temperatures are saved beside the draft (draft_calibration.json).
    """
    from deepinfer.deepspec import calibration
    from deepinfer.deepspec.evaluate import judge_all, open_draft
    from deepinfer.deepspec.targets import load_target
    from deepinfer.models.draft_head import CALIBRATION_NAME

    folder = _folder(target)
    model = load_target(folder, length, device)
    where = Path(draft) if draft else folder
    loaded = open_draft(model, where, length)
    judged = []
    for temperature in (0.0, 1.0):
        answers = _answers(folder, tasks, limit, temperature, max_tokens, device, out)
        everything = [answer for part in answers.values() for answer in part]
        with _progress(f"drafts at temperature {temperature:g}", len(everything)) as advance:
            judged += judge_all(model, loaded, everything, length, advance=advance)
    fitted, held = (calibration.Observations.of(judged[start::2]) for start in (0, 1))
    temperatures = calibration.fit_temperatures(fitted)
    curves = {
        name: (calibration.survival(held.scores, heat), held.survived)
        for name, heat in (("as trained", [1.0] * loaded.block_size), ("calibrated", temperatures))
    }
    for name, curve in curves.items():
        print(f"expected calibration error, {name}: {calibration.expected_calibration_error(*curve):.4f}")
    (where / CALIBRATION_NAME).write_text(json.dumps({"temperatures": temperatures}) + "\n")
    print(f"temperatures {temperatures} saved in {where / CALIBRATION_NAME}")
    if plot is not None:
        calibration.plot_reliability(plot, curves)
