"""`deepinfer doctor`: what this machine can run, and why not more."""

import ctypes.util
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import typer

from deepinfer.commands import options
from deepinfer.commands.units import format_bytes

CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "asimd", "sve")
SUPPORTED_TORCH = ((2, 11), (2, 14))


@dataclass
class Check:
    """One line of the report.  `state`: "ok", "no" (absent, something else is used instead) or "fail" (cannot run)."""

    group: str
    name: str
    state: str
    detail: str


def register(app: typer.Typer) -> None:
    app.command(
        epilog=options.examples("deepinfer doctor", "deepinfer doctor --json"),
    )(doctor)
    help_text = "The same as `doctor`, under vLLM's name."
    app.command("collect-env", help=help_text, epilog=options.examples("deepinfer collect-env"))(doctor)


def doctor(json_output: bool = typer.Option(False, "--json", help="Print the checks as JSON.")) -> None:
    """Show what this machine can run, and why not more.  Exits 0 if the nano model can run here, else 1."""
    checks = list(run_checks())
    failed = [check for check in checks if check.state == "fail"]
    if json_output:
        import json

        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        print_checks(checks)
    raise typer.Exit(1 if failed else 0)


def print_checks(checks: list[Check]) -> None:
    """The report as a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    marks = {"ok": "[green]✓[/]", "no": "[yellow]–[/]", "fail": "[red]✗[/]"}
    table = Table.grid(padding=(0, 2))
    previous = ""
    for check in checks:
        group = check.group if check.group != previous else ""
        table.add_row(group, marks[check.state], escape(check.name), escape(check.detail))
        previous = check.group
    console.print(table)
    failed = [check for check in checks if check.state == "fail"]
    if failed:
        reason = escape(f"{failed[0].name}: {failed[0].detail}")
        console.print(f"\n[red]This machine cannot run the nano model:[/] {reason}")
    else:
        gpu = any(check.group == "gpu" and check.state == "ok" for check in checks)
        console.print(f"\nReady: [bold]deepinfer chat --model nano[/] runs here, on the {'GPU' if gpu else 'CPU'}.")


def run_checks() -> Iterator[Check]:
    """All checks, in the order of the report."""
    yield from check_system()
    yield from check_compiler()
    yield from check_torch()
    yield from check_gpu()
    yield from check_optional()
    yield from check_kernels()
    yield from check_model()


def check_system() -> Iterator[Check]:
    """Python, the machine and its room."""
    from deepinfer.bench.results import cpu_name
    from deepinfer.engine.memory import available_memory

    version_ok = sys.version_info >= (3, 11)
    yield Check("system", "Python", "ok" if version_ok else "fail", f"{platform.python_version()} (needs >= 3.11)")
    yield Check("system", "OS", "ok", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Check("system", "CPU", "ok", f"{cpu_name()}, {len(available_cpus())} cores usable")
    flags = cpu_flags()
    found = [name for name in CPU_FEATURES if name in flags]
    yield Check("system", "CPU features", "ok" if found else "no", ", ".join(found) or "none known")
    memory = available_memory()
    if memory is not None:
        enough = memory > 1e9
        detail = format_bytes(memory) + " free" + ("" if enough else "; nano wants about 1 GB")
        yield Check("system", "memory", "ok" if enough else "no", detail)
    folder = home_dir()
    yield Check("system", "disk", "ok", f"{format_bytes(shutil.disk_usage(folder).free)} free in {folder}")


def home_dir() -> Path:
    """The user's home folder, or where temporary files go for a user without an existing one."""
    try:
        home = Path.home()
    except RuntimeError:  # no HOME and no entry in the user database
        return Path(tempfile.gettempdir())
    return home if home.is_dir() else Path(tempfile.gettempdir())


def available_cpus() -> set[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cpu_flags() -> set[str]:
    """Features of the CPU as Linux names them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith(("flags", "Features"))), set())


def check_compiler() -> Iterator[Check]:
    """A C compiler, for the CPU kernels."""
    from deepinfer.kernels.cpu.build import find_compiler

    command = find_compiler()
    if command is None:
        yield Check("compiler", "C compiler", "no", "none found (gcc or clang): CPU kernels run in PyTorch, slower")
        return
    shown = " ".join(command)
    try:
        answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=20)
        yield Check("compiler", "C compiler", "ok", f"{shown}: {answer.stdout.splitlines()[0]}")
    except (OSError, IndexError, subprocess.TimeoutExpired):
        yield Check("compiler", "C compiler", "no", f"{shown} does not run: CPU kernels run in PyTorch, slower")


def check_torch() -> Iterator[Check]:
    """PyTorch and its threads."""
    try:
        import torch
    except ImportError as error:
        yield Check("torch", "PyTorch", "fail", f"cannot be imported ({error}); run `make install`")
        return
    version = torch.__version__
    numbers = tuple(int(part) for part in version.split(".")[:2])
    supported = SUPPORTED_TORCH[0] <= numbers < SUPPORTED_TORCH[1]
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    detail = f"{version}, {build}, {torch.get_num_threads()} thread(s)"
    detail += "" if supported else "; needs >=2.11,<2.14"
    yield Check("torch", "PyTorch", "ok" if supported else "fail", detail)


def check_gpu() -> Iterator[Check]:
    """CUDA devices, and why there are none."""
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None:
            reason = "no NVIDIA driver on this machine"
        elif torch.version.cuda is None:
            reason = "a driver is there, but this PyTorch is a CPU build"
        else:
            reason = "the driver and this PyTorch do not work together (see nvidia-smi)"
        yield Check("gpu", "CUDA device", "no", reason)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"sm_{properties.major}{properties.minor}"
        detail = f"{properties.name}, {capability}, {format_bytes(free)} of {format_bytes(total)} free"
        yield Check("gpu", f"cuda:{index}", "ok", detail)


def check_optional() -> Iterator[Check]:
    """Packages that some commands need."""
    wanted = {
        "triton": "GPU kernels; comes with a CUDA build of PyTorch",
        "transformers": "only for `deepinfer bench throughput`, extra `dev`",
    }
    for package, purpose in wanted.items():
        present = importlib.util.find_spec(package) is not None
        detail = metadata.version(package) if present else f"not installed ({purpose})"
        yield Check("optional", package, "ok" if present else "no", detail)
    library = ctypes.util.find_library("nvrtc")
    bundled = importlib.util.find_spec("nvidia") is not None
    detail = library or ("bundled with PyTorch" if bundled else "not found (compiles CUDA kernels at run time)")
    yield Check("optional", "nvrtc", "ok" if library or bundled else "no", detail)


def check_kernels() -> Iterator[Check]:
    """Which operations run compiled."""
    try:
        from deepinfer.kernels.cpu import cpu_backend_status
        from deepinfer.kernels.registry import FORCE_REFERENCE, OPERATIONS
    except ImportError as error:  # no PyTorch: already reported
        yield Check("kernels", "CPU kernels", "no", f"cannot be loaded ({error})")
        return
    if FORCE_REFERENCE:
        yield Check("kernels", "all", "no", "DEEPINFER_KERNELS=reference switches every compiled kernel off")
        return
    status = cpu_backend_status()
    yield Check("kernels", "compiled for CPU", "ok" if status.active else "no", status.detail)
    for device in ("cpu", "cuda"):
        compiled = [name for name, operation in OPERATIONS.items() if device in operation.backends]
        if device == "cpu" and not status.active:
            compiled = []  # they are registered, but each falls back
        reference = sorted(OPERATIONS.keys() - compiled)
        detail = f"{len(compiled)} of {len(OPERATIONS)} operations"
        detail += f"; in PyTorch: {', '.join(reference)}" if reference and compiled else ""
        detail += "; all run in PyTorch" if not compiled else ""
        yield Check("kernels", f"{device} backend", "ok" if compiled else "no", detail)


def check_model() -> Iterator[Check]:
    """The shipped checkpoint."""
    directory = Path(__file__).parent.parent / "checkpoints" / "nano"
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).exists()]
    shards = sorted(directory.glob("*.safetensors"))
    if missing or not shards:
        yield Check("model", "nano", "fail", f"missing from {directory}: {', '.join(missing) or '*.safetensors'}")
        return
    size = sum(shard.stat().st_size for shard in shards)
    yield Check("model", "nano", "ok", f"{format_bytes(size)} in {len(shards)} shards")
