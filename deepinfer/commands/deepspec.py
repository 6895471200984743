"""`deepinfer deepspec`: prepare data for a draft model, train it, measure it, calibrate its confidence."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.commands.options import Group, examples, takes

if TYPE_CHECKING:
    from deepinfer.deepspec.acceptance import Answer
    from deepinfer.deepspec.losses import LossWeights

app = typer.Typer(
    help="Train and measure draft models for speculative decoding.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Target = Annotated[str, typer.Option("--target", help="`nano`, a V4.1 checkpoint or a Hugging Face folder.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Tasks = Annotated[
    Path, typer.Option(help="Folder with files of GSM8K, MATH-500, HumanEval, MBPP, MT-Bench, Alpaca ...")
]
Out = Annotated[Path, typer.Option(help="Answers and results go here; a run that was stopped goes on.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Prompts of each task set; default: all.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longest answer.")]
Length = Annotated[int, typer.Option(min=16, help="Tokens of a row: prompt and answer, cut or padded.")]
Draft = Annotated[str | None, typer.Option("--draft", help="Folder of the draft; default: the target's head.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Of the answers; 0 is greedy.")]
Seed = Annotated[int, typer.Option(min=0, help="Same seed, same answers.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw it (.svg or .png); needs matplotlib.")]

# What the commands that let the target answer have in common.
ASKED: Group = {
    "tasks": (Tasks, ...),
    "target": (Target, "nano"),
    "max_tokens": (MaxTokens, 256),
    "limit": (Limit, None),
    "seed": (Seed, 0),
    "device": (Device, "cpu"),
}
# What both kinds of training have in common.
TRAINED: Group = {
    "target": (Target, "nano"),
    "anchors": (Annotated[int, typer.Option(min=1, help="Blocks of a row.")], 64),
    "gamma": (Annotated[float, typer.Option(min=0.1, help="Draft k counts exp(-k / gamma).")], 4.0),
    "coldest": (Annotated[float, typer.Option(min=0.05, max=1.0, help="Lowest temperature drafted for.")], 1.0),
    "at_one": (Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of blocks at temperature 1.")], 0.5),
    "seed": (Annotated[int, typer.Option(min=0)], 0),
    "device": (Device, "cpu"),
    "plot": (Plot, None),
}
MEASURED: Group = ASKED | {"draft": (Draft, None), "length": (Length, 1024), "plot": (Plot, None)}


def _folder(target: str) -> Path:
    from deepinfer.engine.model_path import resolve_model

    return resolve_model(target)


def _loss_weights(how: dict[str, Any]) -> LossWeights:
    from deepinfer.deepspec.losses import LossWeights

    return LossWeights(gamma=how["gamma"], coldest=how["coldest"], at_one=how["at_one"])


@contextmanager
def _progress(text: str, total: int, is_shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; gives the function that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown) as bar:
        task = bar.add_task(text, total=total)
        yield lambda count: bar.advance(task, count)


def _answers(
    asked: dict[str, Any], temperature: float, out: Path, rank: int = 0, ranks: int = 1
) -> dict[str, list[Answer]]:
    """The target's answers to every task set, kept in `out`: one file a set, turn, temperature and process."""
    from deepinfer.deepspec.answers import Sampling, load_writer, write_answers
    from deepinfer.deepspec.targets import fingerprint
    from deepinfer.deepspec.tasks import read_tasks

    folder, found, sets = _folder(asked["target"]), {}, read_tasks(asked["tasks"], asked["limit"])
    sampling = Sampling(temperature, asked["max_tokens"], asked["seed"])
    writer, target = load_writer(folder, asked["device"]), fingerprint(folder)
    part = f".{rank}-of-{ranks}" if ranks > 1 else ""
    for name, prompts in ((name, every[rank::ranks]) for name, every in sets.items()):
        found[name], said = list["Answer"](), [list[list[int]]() for _ in prompts]
        for turn in range(1 + max((len(prompt.later) for prompt in prompts), default=-1)):
            asking = [i for i, prompt in enumerate(prompts) if len(prompt.later) >= turn]
            path = out / f"{name}{f'-turn{turn + 1}' if turn else ''}-t{temperature:g}{part}.jsonl"
            with _progress(f"answers to {path.stem}", len(asking), is_shown=rank == 0) as advance:
                ids = [writer.encode(prompts[i], said[i]) for i in asking]
                answers = write_answers(path, ids, writer.write, sampling, advance, target)
            for i, answer in zip(asking, answers, strict=True):
                said[i].append(answer.token_ids[len(answer.prompt) :])
            found[name] += answers
    del writer  # the engine's memory is wanted for what comes
    gc.collect()
    return found


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
    from deepinfer.deepspec.rows import cache_bytes, rows_of, write_cache
    from deepinfer.deepspec.targets import load_target
    from deepinfer.deepspec.train import processes, wait_for_all

    with processes(asked["device"]) as (rank, ranks, device):
        _answers({**asked, "device": device}, temperature, out / "answers", rank, ranks)
        wait_for_all(ranks)
        rows = rows_of(read_folder(out), length)
        if rank == 0:
            print(f"{len(rows)} rows of {length} tokens, {int(rows.counted.sum()):,} written by the target")
        if not cache:
            return
        model = load_target(_folder(asked["target"]), length, device)
        size = cache_bytes(len(rows), length, model.shape)
        if rank == 0:
            a_token = f"{size / len(rows) / length:,.0f} bytes a token"
            print(f"hidden-state cache: {size / 2**20:,.1f} MiB ({a_token})", flush=True)
        with _progress("shards", -(-len(rows) // rows_a_shard), is_shown=rank == 0) as advance:
            write_cache(out / "cache", rows, model, rows_a_shard, advance, rank, ranks)
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
    num_layers: Annotated[int, typer.Option(min=1)] = 2,
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
    from deepinfer.deepspec.rows import cached_batches, computed_batches, rows_of, shard_sizes
    from deepinfer.deepspec.targets import load_target

    answers = read_folder(data)
    shards = sorted((data / "cache").glob("*.safetensors"))
    if shards:
        cached = shard_sizes(shards)[1]
        if length not in (None, cached):
            raise ValueError(f"length: {length}, allowed: {cached}, that of the cache in {data}")
        length = cached
    length = length or 512
    seed = how["seed"]
    options = training.TrainingOptions(
        steps, batch, how["anchors"], learning_rate, seed=seed, losses=_loss_weights(how)
    )
    with training.processes(how["device"]) as (rank, ranks, own):
        model = load_target(_folder(how["target"]), length, own)
        config = DraftConfig(algorithm, model.shape, block_size, num_layers, noise_token_id=noise_token_id)
        trainer = training.Trainer(build_draft(config, seed).to(own), model, options, ranks)
        trainer.resume(out)
        if shards:
            batches = cached_batches(shards, batch, seed, rank, ranks, own, trainer.step)
        else:
            rows = rows_of(answers, length)
            batches = computed_batches(rows, model, batch, seed, rank, ranks, trainer.step)
        with _progress("steps", steps, is_shown=rank == 0) as advance:
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
@takes(how=TRAINED)
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

    options = v41_train.HeadOptions(
        minutes, stages, batch, reads, how["anchors"], length, peak, how["seed"], _loss_weights(how)
    )
    start = None if init is None else _folder(init)
    run = v41_train.train_head(_folder(how["target"]), data, out, options, how["device"], start)
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
    target: Target = "nano",
) -> None:
    """Put a trained head into a V4.1 checkpoint; the target's own tensors stay as they are. Calibrate it then."""
    from deepinfer.deepspec.v41_checkpoint import attach_head

    config = attach_head(_folder(target), head, out)
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

    folder, length = _folder(asked["target"]), asked["length"]
    where = Path(asked["draft"] or folder)
    answers = _answers(asked, temperature, out)
    model = load_target(folder, length, asked["device"])
    loaded = open_draft(model, where, length)
    judged, lookups = {}, {}
    for name, part in answers.items():
        with _progress(f"drafts of {name}", len(part)) as advance:
            judged[name] = judge_all(model, loaded, part, length, drawn, advance)
        lookups[name] = lookup_all(loaded, part, length)
        if len(judged[name]) < len(part):
            print(f"{name}: {len(part) - len(judged[name])} answers left out, too short or too long for --length")
    rows = summary(judged, lookups, step_times(model, where, loaded))
    if not rows:
        raise ValueError("answers: none is long enough to draft in, allowed: at least 2 tokens")
    record = {"temperature": temperature, "drawn": drawn, "sets": rows}
    (out / "eval.json").write_text(json.dumps(record, indent=1) + "\n")
    table = Table("set", "rounds", "accepted length", "prompt lookup", "accepted by position", "projected speed-up")
    for name, row in rows.items():
        by_position = " ".join(f"{share:.2f}" for share in row["by_position"])
        speed = "-" if row["speed_up"] is None else f"{row['speed_up']:.2f} x"
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
    from deepinfer.models.draft_calibration import DraftCalibration

    folder, length = _folder(asked["target"]), asked["length"]
    where = Path(asked["draft"] or folder)
    every = [[answer for part in _answers(asked, heat, out).values() for answer in part] for heat in (0.0, 1.0)]
    model = load_target(folder, length, asked["device"])
    loaded, judged = open_draft(model, where, length), []
    for heat, answers in zip((0, 1), every, strict=True):
        with _progress(f"drafts at temperature {heat}", len(answers)) as advance:
            judged += judge_all(model, loaded, answers, length, advance=advance, heats=calibration.DRAFT_HEATS)
    fitted, held = (calibration.Observations.of(judged[start::2]) for start in (0, 1))
    temperatures = calibration.fit_temperatures(fitted)
    lengths, held_lengths = (calibration.drawn_lengths(judged[start::2]) for start in (0, 1))
    best, plain = 0 if lengths is None else int(lengths.argmax()), calibration.DRAFT_HEATS.index(1.0)
    draft_temperature = 1.0 if lengths is None else calibration.DRAFT_HEATS[best]
    curves = {
        name: (calibration.survival(held.scores, heat), held.survived)
        for name, heat in (("as trained", [1.0] * loaded.block_size), ("calibrated", temperatures))
    }
    errors = {name: calibration.expected_calibration_error(*curve) for name, curve in curves.items()}
    for name, error in errors.items():
        print(f"expected calibration error, {name}: {error:.4f}")
    record = {"blocks": len(held.scores), "expected_calibration_error": errors, "temperatures": temperatures}
    if held_lengths is not None:
        drawn = {"as trained": float(held_lengths[plain]), "calibrated": float(held_lengths[best])}
        record |= {"draft_temperature": draft_temperature, "drawn_length": drawn}
        print(f"drawn at temperature 1: {drawn['as trained']:.3f} accepted, {drawn['calibrated']:.3f} calibrated")
    (out / "calibration.json").write_text(json.dumps(record, indent=1) + "\n")
    path = DraftCalibration(temperatures, draft_temperature).write(where)
    print(f"temperatures {temperatures} and, of drafts that are drawn, {draft_temperature:g} saved in {path}")
    if asked["plot"] is not None:
        plot_reliability(asked["plot"], curves)
