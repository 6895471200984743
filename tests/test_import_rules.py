"""Imports point one way: server, llm, cli -> engine -> models -> kernels; recipe stands alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "deepinfer"

# What each part may import of deepinfer besides itself.  A new package must be added here.
SHARED = {"errors", "envs", "params", "outputs", "config", "terminal", "files"}
HOST = SHARED | {"engine", "models", "kernels", "sampling", "speculation", "structured", "observability"}
ALLOWED = {
    "errors": set(),
    "envs": {"errors"},
    "terminal": set(),
    "files": set(),
    "params": {"errors", "structured"},
    "structured": {"errors", "envs", "checkpoint_tokenizer"},
    "outputs": set(),
    "config": {"errors", "envs"},
    "kernels": {"errors", "envs", "config", "terminal"},
    "models": SHARED | {"kernels"},
    "sampling": SHARED | {"kernels", "structured"},
    "speculation": SHARED | {"kernels", "models", "sampling"},
    "observability": SHARED,
    "engine": HOST,
    "recipe": set(),
    "checkpoint_tokenizer": {"config", "recipe"},
    "llm": HOST | {"recipe", "checkpoint_tokenizer", "beam_search"},
    "beam_search": {"errors", "outputs", "params"},
    "train": SHARED | {"models", "kernels", "recipe", "llm", "params", "bench"},  # answers questions, records results
    "deepspec": SHARED | {"models", "kernels", "train", "llm", "recipe"},  # the target answers through llm
    "server": HOST | {"recipe", "checkpoint_tokenizer"},
    "bench": HOST | {"recipe", "llm", "server"},
    "commands": HOST | {"recipe", "llm", "train", "deepspec", "server", "bench"},
    "cli": {"commands", "envs", "errors"},
}
FORBIDDEN_LIBRARIES = {"recipe": {"torch", "transformers", "fastapi"}, "engine": {"fastapi", "tokenizers"}}


def part_of(module: str) -> str:
    """`deepinfer.engine.scheduler` -> `engine`."""
    return (module.split(".") + [""])[1]


def imports_of(source: str, path: Path) -> list[str]:
    """Every module that the source of a file imports, at any depth, as an absolute dotted name."""
    found = []
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found += [f"{module}.{alias.name}" for alias in node.names] if module == "deepinfer" else [module]
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if part in ("__init__", ""):
        part = "package"
    allowed = ALLOWED.get(part, {"llm", "params"} if part == "package" else None)
    assert allowed is not None, f"deepinfer.{part} has no entry in the import rules"
    for module in imports_of(path.read_text(encoding="utf-8"), path):
        if module.split(".")[0] == "deepinfer":
            target = part_of(module)
            assert target in allowed | {part, "__version__", ""}, f"{path}: deepinfer.{part} may not import {module}"
        else:
            assert module.split(".")[0] not in FORBIDDEN_LIBRARIES.get(part, set()), f"{path} may not import {module}"


def test_the_rules_see_a_forbidden_import() -> None:
    """Nested, aliased and relative imports are all found."""
    source = "def f():\n    from deepinfer import llm\n    import deepinfer.server.app as a\nfrom ..recipe import x\n"
    found = imports_of(source, PACKAGE / "engine" / "example.py")
    assert found == ["deepinfer.recipe", "deepinfer.llm", "deepinfer.server.app"]


@pytest.mark.parametrize("module", ["deepinfer", "deepinfer.cli", "deepinfer.recipe", "deepinfer.params"])
def test_light_modules_load_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'fastapi', 'transformers'}} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
