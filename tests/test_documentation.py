"""The documentation names what exists, and its examples and tables are true."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from deepinfer.bench.report import update_documents
from deepinfer.bench.results import load_all
from deepinfer.train.draft_report import training

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "deepinfer"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
README = (ROOT / "README.md").read_text()
SERVER = (ROOT / "docs" / "server.md").read_text()
NANO = PACKAGE / "checkpoints" / "nano"


def folders() -> list[str]:
    return sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")


def test_every_package_has_its_line() -> None:
    described = re.findall(r"^- `deepinfer/(\w+)/` — \S", ARCHITECTURE, re.MULTILINE)
    assert described == folders()


def test_every_file_that_is_named_exists() -> None:
    for document in (ARCHITECTURE, README, SERVER):
        for name in re.findall(r"`((?:[a-z0-9_]+/)+[a-z0-9_]*(?:\.py)?|[a-z0-9_]+\.py)`", document):
            assert (PACKAGE / name).exists() or (ROOT / name).exists(), name
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\(([\w/.-]+)\)", path.read_text()):
            assert (path.parent / link).exists(), (path.name, link)


def sources() -> str:
    """Everything that a name in a document may come from."""
    kinds = ("py", "c", "h", "cu", "cuh", "js", "html", "json", "toml")
    files = [path for kind in kinds for path in PACKAGE.rglob(f"*.{kind}") if "checkpoints" not in path.parts]
    files += [path for name in ("tests", "examples", "benchmarks", "scripts") for path in (ROOT / name).rglob("*.*")]
    files += [ROOT / "pyproject.toml", ROOT / "Makefile"]
    texts = [path.read_text(errors="replace") for path in files if path.suffix in (".py", ".md", ".sh", ".toml", "") or
             path.is_relative_to(PACKAGE)]  # fmt: skip
    return "\n".join(texts)


def options_of(command: Any) -> set[str]:
    found = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return found.union(*(options_of(one) for one in getattr(command, "commands", {}).values()))


FOREIGN_NAMES = {"mma.sync", "cp.async.wait_all"}  # instructions
FOREIGN_OPTIONS = {"--help", "--nproc-per-node", "--tensor-parallel-size", "--enable-prefix-caching"}


def test_every_name_in_a_document_is_one_of_the_source() -> None:
    """Names in code marks: files, functions, classes, fields, variables of the environment, options of commands."""
    from deepinfer.cli import app

    text = sources()
    words = set(re.findall(r"\w+", text))
    options = options_of(typer.main.get_command(app)) | set(re.findall(r'"(--[a-z][\w-]*)', text)) | FOREIGN_OPTIONS
    words |= {f"{word}_total" for word in words}  # as Prometheus writes counters
    unknown = []
    for document in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        prose = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for code in re.findall(r"`([^`\n]+)`", prose):
            named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", code))
            unknown += [(document.name, option) for option in named - options]
            names = re.fullmatch(r"\w+(?:\.[A-Za-z_]\w*)*(?:\(\))?", code) and code not in FOREIGN_NAMES
            if names and not re.fullmatch(r"[\w-]+\.(?:py|md|c|cu|cuh|json|txt|svg)", code):
                parts = re.findall(r"[A-Za-z_]\w*", code)
                telling = len(parts) > 1 or "_" in code or re.search("[a-z][A-Z]", code)
                unknown += [(document.name, code) for part in parts if telling and part not in words]
    assert unknown == []


def test_the_table_of_commands_is_complete() -> None:
    from deepinfer.cli import app

    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    listed = set(re.findall(r"^\| `deepinfer ([\w-]+)", README, re.MULTILINE))
    assert listed == names | {"bench", "deepspec", "kernels", "recipe"}


def test_the_table_of_routes_is_complete() -> None:
    from deepinfer.server.app import ROUTERS

    paths = {
        route.path.replace("{name:path}", "{id}").replace("{response_id}", "{id}")  # type: ignore[attr-defined]
        for module in ROUTERS
        for route in module.router.routes
    }
    table = SERVER[SERVER.index("| Route |") :]
    rows = "\n".join(line.split("|")[1] for line in table[: table.index("\n\n")].splitlines())
    assert set(re.findall(r"(/[\w/{}.]+)", rows)) == paths


def test_the_results_tables_are_current() -> None:
    stale = update_documents(ROOT, load_all(ROOT / "benchmarks" / "results"), write=False)
    assert stale == [], "run `deepinfer bench report --update` and commit the documents"


def test_the_runs_that_trained_the_draft_head_are_all_there() -> None:
    logs = sorted((ROOT / "benchmarks" / "nano").glob("draft_training*.json"))
    runs = [json.loads(path.read_text()) for path in logs]
    assert f"-->\n{training(runs)}<!--" in (ROOT / "docs" / "nano.md").read_text()


@pytest.mark.skipif(not list(NANO.glob("*.safetensors")), reason="the nano weights are not in this checkout")
def test_the_python_example_runs() -> None:
    example = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "LLM(" in block)
    answer = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.split()) > 20
