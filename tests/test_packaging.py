"""What is installed: dependency ranges, the torch installer's choice, the files that must ship."""

import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install_torch = load_script("install_torch")


def test_every_dependency_has_a_lower_and_an_upper_bound() -> None:
    requirements = PROJECT["dependencies"] + sum(PROJECT["optional-dependencies"].values(), [])
    for requirement in requirements:
        assert re.fullmatch(r"[\w\[\]-]+(>=[\d.]+,<[\d.]+|==[\d.]+)(; .+)?", requirement), requirement


def test_core_dependencies_need_no_triton() -> None:
    names = {re.split(r"[>\[]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert not names & {"triton", "tilelang", "transformers", "ray"}


def test_torch_installer_agrees_with_pyproject() -> None:
    low, below = (".".join(map(str, bound)) for bound in (install_torch.MINIMUM, install_torch.BELOW))
    assert f"torch>={low},<{below}" in PROJECT["dependencies"]


@pytest.mark.parametrize(
    ("version", "requirements", "expected"),
    [
        ("2.13.0+cpu", ["filelock"], True),
        ("2.13.0", ["filelock", "sympy>=1.13.3"], True),  # macOS
        ("2.13.0", ["filelock", 'nvidia-cublas-cu12==12.8; platform_system == "Linux"'], False),
        ("2.13.0", ["cuda-bindings>=13"], False),
        ("2.13.0+cu130", ["triton==3.7.0"], False),
        ("2.13.0", ['triton>=3; extra == "compile"'], True),
    ],
)
def test_torch_installer_tells_cpu_builds(version: str, requirements: list[str], expected: bool) -> None:
    assert install_torch.is_cpu_build(version, requirements) is expected


def test_the_installed_command_prints_the_version() -> None:
    from deepinfer import __version__

    answer = subprocess.run([sys.executable, "-m", "deepinfer.cli", "version"], capture_output=True, text=True)
    assert answer.returncode == 0 and answer.stdout.startswith(f"deepinfer {__version__} ")


def test_public_names_are_exported_lazily() -> None:
    import deepinfer

    assert deepinfer.SamplingParams(temperature=0.0).temperature == 0.0
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        deepinfer.Nothing  # noqa: B018


def test_the_repository_tests_itself_with_the_readme_command() -> None:
    """README, Makefile and CI name the same command."""
    assert "make test" in (ROOT / "README.md").read_text()
    assert re.search(r"^test:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "make --no-print-directory test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
def test_the_wheel_carries_code_kernels_and_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True)
    names = set(zipfile.ZipFile(next(tmp_path.glob("deepinfer-*.whl"))).namelist())
    tracked = subprocess.run(["git", "ls-files", "deepinfer"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(tracked.stdout.split()) <= names
