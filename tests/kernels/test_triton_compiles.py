"""Every Triton kernel of the repository compiles for Hopper, on a machine without a GPU."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent.parent


@cache
def jitted() -> dict[str, set[str]]:
    """All functions that Triton compiles: names of everything that they mention, by `module.name`."""
    found = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(is_jit(decorator) for decorator in node.decorator_list):
                found[f"{module(path)}.{node.name}"] = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found


def is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) == "jit"


@cache
def launched() -> dict[Path, set[str]]:
    """Kernels that a file launches as `kernel[grid](...)`, by name; they are its own."""
    found = {}
    for path, tree in trees().items():
        subscripts = [
            n.func.value for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)
        ]
        names = {n.id for n in subscripts if isinstance(n, ast.Name) and f"{module(path)}.{n.id}" in jitted()}
        if names:
            found[path] = names
    return found


@cache
def trees() -> dict[Path, ast.Module]:
    paths = sorted((ROOT / "deepinfer").rglob("*.py"))
    return {path: ast.parse(path.read_text()) for path in paths if "triton" in path.read_text()}


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def backends_of(path: Path) -> list[str]:
    """What compiles the kernels of a file: its operations, or training."""
    operations = re.findall(r'^@?backend\("(\w+)", "cuda"\)', path.read_text(), re.MULTILINE)
    return ["train"] if path.parent.name == "train" else operations


def compile_for_hopper(*arguments: str) -> set[str]:
    """Kernels that compiled, as `module.name`."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_hopper", *arguments],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return set(run.stdout.split())


def test_no_kernel_can_be_forgotten():
    """Each is launched in its file, or part of one that is (called by it, or handed to a reduction)."""
    reached = {f"{module(path)}.{name}" for path, names in launched().items() for name in names}
    assert len(reached) > 40
    waiting = list(reached)
    while waiting:
        mentioned = jitted()[waiting.pop()]
        parts = {name for name in jitted() if name.rpartition(".")[2] in mentioned} - reached
        reached |= parts
        waiting += parts
    assert reached == set(jitted())


def test_every_launching_file_has_something_that_compiles_it():
    assert all(backends_of(path) for path in launched())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("half", (0, 1))  # for two workers; a process a file would spend its time on imports
def test_compiles_for_hopper(half):
    files = list(launched())[half::2]
    compiled = compile_for_hopper(*sorted({name for path in files for name in backends_of(path)}))
    assert {f"{module(path)}.{name}" for path in files for name in launched()[path]} <= compiled


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_case_compiles_for_hopper():
    assert compile_for_hopper("--all")
