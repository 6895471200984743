"""Install PyTorch into the running environment without pulling CUDA wheels onto a machine that has no GPU.

Order: keep a torch that is already in range; with a working `nvidia-smi` take what pip offers; without one ask pip
(dry run, nothing is downloaded but metadata) what it would install and accept that if it is a CPU build, else use
PyTorch's own CPU index. Needs only the standard library and pip.

    python scripts/install_torch.py            # torch 2.13.0
    TORCH_VERSION=2.12.0 python scripts/install_torch.py
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VERSION = os.environ.get("TORCH_VERSION", "2.13.0")
MINIMUM, BELOW = (2, 11), (2, 14)  # keep in step with pyproject.toml
CUDA_REQUIREMENT = re.compile(r"^(nvidia|cuda|triton)\b", re.IGNORECASE)


def installed_torch() -> str | None:
    """The version of an installed torch in the supported range, or None."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    major, minor = (int(part) for part in version.split(".")[:2])
    return version if MINIMUM <= (major, minor) < BELOW else None


def has_nvidia_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def is_cpu_build(version: str, requirements: list[str]) -> bool:
    """A CPU wheel says so in its local version, or needs none of the CUDA packages."""
    if version.endswith("+cpu"):
        return True
    needed = [line for line in requirements if "extra ==" not in line]
    return not any(CUDA_REQUIREMENT.match(line) for line in needed)


def default_is_cpu_build() -> bool:
    """True if pip, configured as it is, would install a CPU build of torch."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    command += ["--retries", "1", "--report", "-", f"torch=={VERSION}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
        chosen = json.loads(answer.stdout)["install"][0]["metadata"]
    except (subprocess.TimeoutExpired, ValueError, KeyError, IndexError):
        return False
    return is_cpu_build(chosen["version"], chosen.get("requires_dist", []))


def pip_install(*arguments: str) -> bool:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    return subprocess.run(command).returncode == 0


def main() -> int:
    present = installed_torch()
    if present is not None:
        print(f"torch {present} is already installed")
        return 0
    requirement = f"torch=={VERSION}"
    if has_nvidia_gpu():
        print(f"installing {requirement} (CUDA build: an NVIDIA GPU was found)")
        done = pip_install(requirement)
    elif default_is_cpu_build():
        print(f"installing {requirement} (CPU build)")
        done = pip_install(requirement)
    else:
        print(f"installing {requirement} (CPU build) from {CPU_INDEX}")
        done = pip_install("--retries", "2", "--index-url", CPU_INDEX, requirement)
    if not done:
        print(
            f"error: could not install {requirement}. Install torch >=2.11,<2.14 into this environment yourself "
            "(https://pytorch.org/get-started/locally) and run the same command again.",
            file=sys.stderr,
        )
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
