"""`deepinfer deepspec`: prepare data for a draft model, train it, measure it, calibrate its confidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer.commands.deepspec_options import (
    ASKED,
    HEAD_TRAINED,
    MEASURED,
    TRAINED,
    Length,
    Out,
    Temperature,
    V41Target,
    ask_target,
    check_plot,
    checked_draft,
    folder_of,
    loss_weights,
    progress,
)
from deepinfer.commands.options import examples, takes

app = typer.Typer(
    help="Train and measure draft models for speculative decoding.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(
    epilog=examples(
        "deepinfer deepspec prepare --target nano --tasks ./tasks --out ./data",
        "deepinfer deepspec prepare --target ./Qwen3-4B --tasks ./tasks --out ./data --cache --device cuda",
        "torchrun --nproc-per-node 8 -m deepinfer.cli deepspec prepare ... --device cuda",
    )
)
@takes(asked=ASKED)
def prepare(
    out: Out,
    asked: dict[str, Any],
    temperature: Temperature = 0.7,
    length: Length = 512,
    cache: Annotated[bool, typer.Option("--cache", help="Also store the target's hidden states.")] = False,
    rows_a_shard: Annotated[int, typer.Option(min=1)] = 256,
) -> None:
    """Let the target answer prompts, and store its hidden states if asked to. The size is printed before it starts.

    Rows are all answers in the folder, also those of an earlier run with another temperature.
    """
    from deepinfer.deepspec.answers import read_folder
    from deepinfer.deepspec.files import check_output_folder
    from deepinfer.deepspec.rows import cache_bytes, check_room, rows_of, write_cache
    from deepinfer.deepspec.targets import fingerprint, load_target, target_shape
    from deepinfer.deepspec.tasks import read_tasks
    from deepinfer.deepspec.train import processes, wait_for_all

    folder = folder_of(asked["target"])
    with processes(asked["device"]) as (rank, ranks, device):
        check_output_folder(out)
        sets = read_tasks(asked["tasks"], asked["limit"])
        turns = sum(1 + len(prompt.later) for prompts in sets.values() for prompt in prompts)
        most = cache_bytes(turns, length, target_shape(folder))
        if cache:  # known before hours of answering
            check_room(out, most - sum(path.stat().st_size for path in (out / "cache").glob("shard-*")))
        if rank == 0 and cache:
            print(f"{turns} prompts: hidden states of at most {most / 2**20:,.1f} MiB", flush=True)
        ask_target({**asked, "device": device}, temperature, out / "answers", rank, ranks)
        wait_for_all(ranks)
        answers = read_folder(out)
        rows = rows_of(answers, length)
        if rank == 0:
            print(f"{len(rows)} rows of {length} tokens, {int(rows.counted.sum()):,} written by the target")
            if len(rows) < len(answers):
                print(f"{len(answers) - len(rows)} answers left out: their prompts alone fill a row, see --length")
        if not cache:
            return
        model = load_target(folder, length, device)
        size = cache_bytes(len(rows), length, model.shape)
        if rank == 0:
            a_token = f"{size / len(rows) / length:,.0f} bytes a token"
            print(f"hidden-state cache: {size / 2**20:,.1f} MiB ({a_token})", flush=True)
        with progress("shards", -(-len(rows) // rows_a_shard), is_shown=rank == 0) as advance:
            write_cache(out / "cache", rows, model, rows_a_shard, advance, rank, ranks, fingerprint(folder))
        wait_for_all(ranks)


@app.command(
    epilog=examples(
        "deepinfer deepspec train --target nano --data ./data --algorithm dspark --out ./draft",
        "deepinfer deepspec train --target ./Qwen3-4B --data ./data --algorithm eagle3 --out ./draft --device cuda",
        "torchrun --nproc-per-node 8 -m deepinfer.cli deepspec train ... --device cuda",
    )
)
@takes(how=TRAINED)
def train(
    data: Annotated[Path, typer.Option(help="Folder that `prepare` wrote.")],
    out: Annotated[Path, typer.Option(help="The draft goes here; a run that was stopped goes on.")],
    how: dict[str, Any],
    algorithm: Annotated[str, typer.Option(help="dflash, dspark or eagle3.")] = "dspark",
    steps: Annotated[int, typer.Option(min=1)] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step, of each process.")] = 8,
    block_size: Annotated[int, typer.Option(min=1, help="Drafts of a block.")] = 5,
    num_layers: Annotated[int | None, typer.Option(min=1, help="Default: 2, of eagle3 its one.")] = None,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 6e-4,
    noise_token_id: Annotated[int, typer.Option(min=0, help="Stands for the tokens to be drafted.")] = 0,
    length: Annotated[
        int | None, typer.Option(min=16, help="Tokens of a row; default: those of the cache, or 512.")
    ] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 200,
) -> None:
    """Train a draft on the target's answers; hidden states come from the cache if there is one."""
    from deepinfer.deepspec import train as training
    from deepinfer.deepspec.answers import read_folder
    from deepinfer.deepspec.drafts import DraftConfig, build_draft
    from deepinfer.deepspec.files import check_output_folder
    from deepinfer.deepspec.rows import cached_batches, computed_batches, rows_of, shard_sizes
    from deepinfer.deepspec.targets import fingerprint, load_target, target_shape

    check_output_folder(out)
    check_plot(how)
    folder = folder_of(how["target"])
    name = fingerprint(folder)
    answers = read_folder(data, name)
    shards = sorted((data / "cache").glob("shard-*.safetensors"))
    if shards:
        cached = shard_sizes(shards, target_shape(folder), name)[1]
        if length not in (None, cached):
            raise ValueError(f"length: {length}, allowed: {cached}, that of the cache in {data}")
        length = cached
    length = length or 512
    seed = how["seed"]
    options = training.TrainingOptions(steps, batch, how["anchors"], learning_rate, seed=seed, losses=loss_weights(how))
    with training.processes(how["device"]) as (rank, ranks, own):
        model = load_target(folder, length, own)
        layers = num_layers or (1 if algorithm == "eagle3" else 2)
        config = DraftConfig(algorithm, model.shape, block_size, layers, noise_token_id=noise_token_id)
        trainer = training.Trainer(build_draft(config, seed).to(own), model, options, ranks, rank)
        trainer.resume(out)
        if shards:
            batches = cached_batches(shards, batch, seed, rank, ranks, own, trainer.step)
        else:
            rows = rows_of(answers, length)
            batches = computed_batches(rows, model, batch, seed, rank, ranks, trainer.step)
        with progress("steps", steps, is_shown=rank == 0) as advance:
            advance(trainer.step)

            def after(trainer: training.Trainer) -> None:
                advance(1)
                if rank == 0 and trainer.step % max(steps // 10, 1) == 0 and trainer.log:
                    print(", ".join(f"{name} {value:.4g}" for name, value in trainer.log[-1].items()), flush=True)
                if rank == 0 and (trainer.step % save_every == 0 or trainer.step == steps):
                    trainer.save(out)

            trainer.train(batches, after)
    if how["plot"] is not None and rank == 0:
        from deepinfer.deepspec.plots import plot_training

        plot_training(how["plot"], trainer.log)


@app.command(
    epilog=examples(
        "deepinfer deepspec train-head --target nano --data ./data --out ./head --minutes 4 --device cuda",
        "deepinfer deepspec attach --target nano --head ./head/model-draft.safetensors --out ./nano-with-head",
    )
)
@takes(how=HEAD_TRAINED)
def train_head(
    data: Annotated[list[Path], typer.Option(help="Folder of `prepare`, or with train-N.npy; may be repeated.")],
    out: Annotated[Path, typer.Option(help="model-draft.safetensors and training.json go here.")],
    how: dict[str, Any],
    minutes: Annotated[float, typer.Option(min=0.01, help="Length of the schedule.")],
    init: Annotated[
        str | None, typer.Option(help="Go on from the head of this checkpoint, with a lower --peak.")
    ] = None,
    stages: Annotated[int, typer.Option(min=1, help="Draft layers (num_nextn_predict_layers).")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 16,
    reads: Annotated[int, typer.Option(min=1, help="Batches that the target reads at a time.")] = 4,
    peak: Annotated[float, typer.Option(min=0.0, help="Times all learning rates.")] = 1.0,
    length: Length = 1024,
) -> None:
    """Train the draft head of a V4.1 checkpoint, which the engine runs."""
    from deepinfer.deepspec import v41_train
    from deepinfer.deepspec.files import check_output_folder
    from deepinfer.deepspec.train import check_device

    check_device(how["device"])
    check_output_folder(out)
    check_plot(how)
    options = v41_train.HeadOptions(
        minutes, stages, batch, reads, how["anchors"], length, peak, how["seed"], loss_weights(how)
    )
    start = None if init is None else folder_of(init)
    run = v41_train.train_head(folder_of(how["target"]), data, out, options, how["device"], start)
    if how["plot"] is not None:
        from deepinfer.deepspec.plots import plot_training

        plot_training(how["plot"], run.log)


@app.command(
    epilog=examples(
        "deepinfer deepspec attach --target nano --head ./head/model-draft.safetensors --out ./nano-with-head"
    )
)
def attach(
    head: Annotated[Path, typer.Option(help="model-draft.safetensors of `train-head`.")],
    out: Annotated[Path, typer.Option(help="Where the checkpoint with this head goes; may be the target's folder.")],
    target: V41Target = "nano",
) -> None:
    """Put a trained head into a V4.1 checkpoint; the target's own tensors stay as they are. Calibrate it then."""
    from deepinfer.deepspec.v41_checkpoint import attach_head

    config = attach_head(folder_of(target), head, out)
    print(f"{out}: {config.num_nextn_predict_layers} draft layers, {config.dspark_block_size} drafts a round")


@app.command(
    epilog=examples(
        "deepinfer deepspec eval --target nano --tasks ./tasks --out ./eval",
        "deepinfer deepspec eval --target ./Qwen3-4B --draft ./draft --tasks ./tasks --out ./eval --temperature 1",
    )
)
@takes(asked=MEASURED)
def eval(
    out: Out,
    asked: dict[str, Any],
    temperature: Temperature = 0.0,
    drawn: Annotated[bool, typer.Option("--drawn", help="Draw drafts, not the most likely tokens.")] = False,
) -> None:
    """Acceptance length and projected speed-up of a draft on each task set, with prompt lookup beside it."""
    from rich.console import Console
    from rich.table import Table

    from deepinfer.deepspec.evaluate import judge_all, lookup_all, open_draft, step_times, summary
    from deepinfer.deepspec.plots import plot_acceptance
    from deepinfer.deepspec.targets import load_target

    folder, length = folder_of(asked["target"]), asked["length"]
    where = checked_draft(asked, folder, out)
    answers = ask_target(asked, temperature, out)
    model = load_target(folder, length, asked["device"])
    loaded = open_draft(model, where, length)
    judged, lookups = {}, {}
    for name, part in answers.items():
        with progress(f"drafts of {name}", len(part)) as advance:
            judged[name] = judge_all(model, loaded, part, length, drawn, advance)
        lookups[name] = lookup_all(loaded, part, length)
        if len(judged[name]) < len(part):
            print(f"{name}: {len(part) - len(judged[name])} answers left out, too short or too long for --length")
    rows = summary(judged, lookups, step_times(model, folder, where, loaded))
    if not rows:
        raise ValueError("answers: none is long enough to draft in, allowed: at least 2 tokens")
    record = {"temperature": temperature, "drawn": drawn, "sets": rows}
    (out / "eval.json").write_text(json.dumps(record, indent=1) + "\n")
    table = Table("set", "rounds", "accepted length", "prompt lookup", "accepted by position", "projected speed-up")
    for name, row in rows.items():
        by_position = " ".join(f"{share:.2f}" for share in row["by_position"])
        speed = f"{row['speed_up']:.2f} x"
        lengths = f"{row['mean_length']:.2f}", f"{row['prompt_lookup']:.2f}"
        table.add_row(name, f"{row['rounds']:,}", *lengths, by_position, speed)
    Console().print(table)
    if asked["plot"] is not None:
        plot_acceptance(asked["plot"], rows)


@app.command(
    epilog=examples(
        "deepinfer deepspec calibrate --target nano --tasks ./tasks --out ./eval",
        "deepinfer deepspec calibrate --target nano --tasks ./tasks --out ./eval --plot calibration.svg",
    )
)
@takes(asked=MEASURED)
def calibrate(out: Out, asked: dict[str, Any]) -> None:
    """Fit the confidence's temperatures on every other answer, and say how good they are on the rest.

    Answers are drawn at temperature 0 and 1; those at 1 also say by what to divide the logits that drafts are drawn
    from. Temperatures are saved beside the draft (draft_calibration.json), the errors in --out (calibration.json).
    """
    from deepinfer.deepspec import calibration
    from deepinfer.deepspec.evaluate import judge_all, open_draft
    from deepinfer.deepspec.plots import plot_reliability
    from deepinfer.deepspec.targets import load_target

    folder, length = folder_of(asked["target"]), asked["length"]
    where = checked_draft(asked, folder, out)
    every = [[answer for part in ask_target(asked, heat, out).values() for answer in part] for heat in (0.0, 1.0)]
    model = load_target(folder, length, asked["device"])
    loaded, judged = open_draft(model, where, length), []
    for heat, answers in zip((0, 1), every, strict=True):
        with progress(f"drafts at temperature {heat}", len(answers)) as advance:
            judged += judge_all(model, loaded, answers, length, advance=advance, heats=calibration.DRAFT_HEATS)
    found = calibration.fit(judged)
    for name, error in found.errors.items():
        print(f"expected calibration error, {name}: {error:.4f}")
    temperatures, draft_temperature = found.calibration.temperatures, found.calibration.draft_temperature
    record = {
        "blocks": found.num_blocks,
        "expected_calibration_error": found.errors,
        "temperatures": temperatures,
    }
    if found.drawn is not None:
        record |= {"draft_temperature": draft_temperature, "drawn_length": found.drawn}
        lengths = found.drawn
        print(f"drawn at temperature 1: {lengths['as trained']:.3f} accepted, {lengths['calibrated']:.3f} calibrated")
    (out / "calibration.json").write_text(json.dumps(record, indent=1) + "\n")
    path = found.calibration.write(where)
    print(f"temperatures {temperatures} and, of drafts that are drawn, {draft_temperature:g} saved in {path}")
    if asked["plot"] is not None:
        plot_reliability(asked["plot"], found.curves)
