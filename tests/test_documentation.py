"""The documentation names what exists, and its examples and tables are true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.bench.report import update_documents
from deepinfer.bench.results import load_all

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
        for link in re.findall(r"\]\(([\w/.]+)\)", document):
            assert (ROOT / link).exists() or (ROOT / "docs" / link).exists(), link


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


@pytest.mark.skipif(not list(NANO.glob("*.safetensors")), reason="the nano weights are not in this checkout")
def test_the_python_example_runs() -> None:
    example = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "LLM(" in block)
    answer = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.split()) > 20
