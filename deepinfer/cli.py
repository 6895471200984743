"""The `deepinfer` command."""

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _root() -> None:
    """A small inference engine for DeepSeek-V4.1-class models."""


@app.command()
def version() -> None:
    """Print the version."""
    from deepinfer import __version__

    print(__version__)


def main() -> None:
    app()
