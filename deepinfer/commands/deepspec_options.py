"""What the commands of `deepinfer deepspec` share: options, progress bars, the target's answers, checks up front."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.commands.options import Group

if TYPE_CHECKING:
    from deepinfer.deepspec.acceptance import Answer
    from deepinfer.deepspec.losses import LossWeights

Target = Annotated[str, typer.Option("--target", help="`nano`, a V4.1 checkpoint or a Hugging Face folder.")]
V41Target = Annotated[str, typer.Option("--target", help="`nano` or a V4.1 checkpoint.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Tasks = Annotated[
    Path, typer.Option(help="Folder with files of GSM8K, MATH-500, HumanEval, MBPP, MT-Bench, Alpaca ...")
]
Out = Annotated[Path, typer.Option(help="Answers and results go here; a run that was stopped goes on.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Prompts of each task set; default: all.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longest answer.")]
Length = Annotated[int, typer.Option(min=16, help="Tokens of a row: prompt and answer, cut or padded.")]
Draft = Annotated[str | None, typer.Option("--draft", help="Folder of the draft; default: the target's head.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=10.0, help="Of the answers; 0 is greedy.")]
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
HEAD_TRAINED: Group = TRAINED | {"target": (V41Target, "nano")}
MEASURED: Group = ASKED | {"draft": (Draft, None), "length": (Length, 1024), "plot": (Plot, None)}


def folder_of(target: str) -> Path:
    """The target's folder. Raises ValueError naming what is not there."""
    from deepinfer.engine.model_path import resolve_model

    return resolve_model(target)


def loss_weights(how: dict[str, Any]) -> LossWeights:
    """The weights of the loss as asked for."""
    from deepinfer.deepspec.losses import LossWeights

    return LossWeights(gamma=how["gamma"], coldest=how["coldest"], at_one=how["at_one"])


def check_plot(how: dict[str, Any]) -> None:
    """Raises ValueError for a picture that cannot be drawn, before any work is done."""
    if how["plot"] is not None:
        from deepinfer.deepspec.plots import check_picture

        check_picture(how["plot"])


def checked_draft(asked: dict[str, Any], folder: Path, out: Path) -> Path:
    """Where the draft lies that is measured. What is wrong with it and with --out is said before the target answers."""
    from deepinfer.deepspec.evaluate import check_draft
    from deepinfer.deepspec.files import check_output_folder
    from deepinfer.deepspec.train import check_device

    where = Path(asked["draft"] or folder)
    check_device(asked["device"])
    check_draft(folder, where)
    check_output_folder(out)
    check_plot(asked)
    return where


@contextmanager
def progress(text: str, total: int, is_shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; gives the function that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown) as bar:
        task = bar.add_task(text, total=total)
        yield lambda count: bar.advance(task, count)


def ask_target(
    asked: dict[str, Any], temperature: float, out: Path, rank: int = 0, ranks: int = 1
) -> dict[str, list[Answer]]:
    """The target's answers to every task set, kept in `out`, with bars of the first process."""
    from deepinfer.deepspec.answers import Sampling, answer_tasks
    from deepinfer.deepspec.tasks import read_tasks

    folder, sets = folder_of(asked["target"]), read_tasks(asked["tasks"], asked["limit"])
    sampling = Sampling(temperature, asked["max_tokens"], asked["seed"])
    bar = partial(progress, is_shown=rank == 0)
    return answer_tasks(folder, sets, sampling, asked["device"], out, bar, rank, ranks)
