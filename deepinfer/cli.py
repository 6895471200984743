"""The `deepinfer` command: one module of `deepinfer.commands` per subcommand.

Nothing heavy is imported until a command runs, so `deepinfer --help` answers at once.
A user's mistake is one line on stderr and exit code 2; `--debug` or DEEPINFER_DEBUG=1 shows the traceback.
"""

import os
import sys

import typer

from deepinfer import envs
from deepinfer.commands import bench, chat, deepspec, doctor, generate, kernels, plan, recipe, run_batch, serve
from deepinfer.commands.options import examples
from deepinfer.commands.other_engines import advice
from deepinfer.errors import EngineStoppedError

app = typer.Typer(
    name="deepinfer",
    help="A small inference engine for DeepSeek-V4.1-class models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback(epilog=examples("deepinfer chat", "deepinfer generate 'Once upon a time'", "deepinfer serve --port 8000"))
def root(
    debug: bool = typer.Option(False, "--debug", hidden=True, help="Show the traceback of an error."),
    version: bool = typer.Option(False, "--version", is_eager=True, callback=print_version, help="Print the versions."),
) -> None:
    if debug:
        os.environ["DEEPINFER_DEBUG"] = "1"


@app.command(epilog=examples("deepinfer version"))
def version() -> None:
    """Print the versions of deepinfer, Python and PyTorch."""
    import platform
    from importlib import metadata

    from deepinfer import __version__

    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch_version = "not installed"
    print(f"deepinfer {__version__} (Python {platform.python_version()}, torch {torch_version})")


generate.register(app)
chat.register(app)
serve.register(app)
run_batch.register(app)
doctor.register(app)
plan.register(app)
app.add_typer(bench.app, name="bench")
app.add_typer(deepspec.app, name="deepspec")
app.add_typer(kernels.app, name="kernels")
app.add_typer(recipe.app, name="recipe")


def describe(error: Exception) -> str:
    """The error on one line."""
    # Usage errors of typer carry format_message(); its exception classes moved between releases.
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    if hasattr(error, "possibilities") and (instead := advice(getattr(error, "option_name", ""))):
        text = f"{error.option_name} is another engine's option: {instead}"  # type: ignore[attr-defined]
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror.lower()}: {error.filename}" if error.filename else error.strerror.lower()
    return " ".join(text.split()) or type(error).__name__


def wants_traceback() -> bool:
    try:
        return envs.get("DEEPINFER_DEBUG")
    except ValueError:
        return True  # set to something odd: whoever set it wants to see more


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    try:
        code = app(args=arguments, prog_name="deepinfer", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` closed the pipe: no noise at exit
        sys.exit(1)
    except Exception as error:  # noqa: BLE001  a traceback is never shown to a user
        if wants_traceback():
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # the help was asked for by giving no arguments
            print(error.format_message(), end="")  # type: ignore[attr-defined]  # empty where it has been printed
            sys.exit(0)
        bad_input = isinstance(error, ValueError | OSError) or hasattr(error, "format_message")
        if type(error).__name__ == "Abort":
            sys.exit(130)
        explains_itself = bad_input or isinstance(error, EngineStoppedError)
        prefix = "error:" if explains_itself else f"error: unexpected {type(error).__name__}:"
        suffix = "" if explains_itself else " (DEEPINFER_DEBUG=1 shows where)"
        print(f"{prefix} {describe(error)}{suffix}", file=sys.stderr)
        sys.exit(2 if bad_input else 1)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
