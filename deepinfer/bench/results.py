"""Benchmark results on disk: `benchmarks/results/<area>.json`, a list of records, one a measurement.

A benchmark builds records with `measured(...)` and writes them with `save`.  A record that misses its target stays:
the file says what was measured, not what was hoped for.
"""

import json
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from deepinfer.files import replacing

RESULTS_DIR = Path("benchmarks/results")
_PACKAGES = ("deepinfer", "torch", "transformers", "triton", "tilelang", "numpy", "llguidance", "xgrammar")


@dataclass
class Record:
    """One measurement.

    `target` is compared with `ratio` when there is a baseline, else with `value` (None: no target was set).
    `ratio` is value over baseline of the same run; `samples` holds the raw medians that `value` was taken from.
    """

    name: str
    part: str  # the part of the plan that asks for this figure, e.g. "1"
    unit: str
    value: float
    baseline_name: str | None = None
    baseline_value: float | None = None
    ratio: float | None = None
    target: float | None = None
    higher_is_better: bool = True
    device: str = ""
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    commit: str = ""
    samples: list[Any] = field(default_factory=list)

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None without a target."""
        figure = self.value if self.ratio is None else self.ratio
        if self.target is None:
            return None
        return figure >= self.target if self.higher_is_better else figure <= self.target


def measured(
    name: str,
    *,
    part: str,
    unit: str,
    value: float,
    command: str,
    baseline_name: str | None = None,
    baseline_value: float | None = None,
    target: float | None = None,
    higher_is_better: bool = True,
    samples: Sequence[Any] = (),
    device: str | None = None,
) -> Record:
    """A record with ratio, device, versions, date and commit filled in for this machine."""
    return Record(
        name=name,
        part=part,
        unit=unit,
        value=value,
        baseline_name=baseline_name,
        baseline_value=baseline_value,
        ratio=value / baseline_value if baseline_value else None,
        target=target,
        higher_is_better=higher_is_better,
        device=device or device_name(),
        command=command.replace(f"{Path.cwd()}/", ""),  # a record is no place for one machine's folders
        versions=package_versions(),
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=current_commit(),
        samples=list(samples),
    )


def median_of(name: str, samples: Sequence[float], **known: Any) -> Record:
    """A record of the median of these samples, which it keeps; `known` are the other arguments of `measured`."""
    return measured(name, value=statistics.median(samples), samples=samples, **known)


def save(area: str, records: Iterable[Record], directory: Path = RESULTS_DIR) -> Path:
    """Write records to `<directory>/<area>.json`; a record replaces the older one of the same name and device."""
    path = directory / f"{area}.json"
    merged = {(record.name, record.device): record for record in (load(path) if path.exists() else [])}
    merged.update({(record.name, record.device): record for record in records})
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(record) for record in merged.values()], indent=1, ensure_ascii=False)
    with replacing(path) as part:
        part.write_text(text + "\n")
    return path


def load(path: Path) -> list[Record]:
    """Records of one file.  Raises ValueError naming the file and the field when it has another shape."""
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(raw, list):
        raise ValueError(f"{path}: must hold a JSON list of records")
    names = {entry.name for entry in fields(Record)}
    for position, entry in enumerate(raw):
        if not isinstance(entry, dict) or set(entry) != names:
            wrong = sorted(set(entry) ^ names) if isinstance(entry, dict) else type(entry).__name__
            raise ValueError(f"{path}: record {position} has missing or unknown fields: {wrong}")
    return [Record(**entry) for entry in raw]


def load_all(directory: Path = RESULTS_DIR) -> dict[str, list[Record]]:
    """Area -> records, areas in alphabetical order.  An absent directory has none."""
    return {path.stem: load(path) for path in sorted(directory.glob("*.json"))}


def device_name() -> str:
    """The GPU's name, else the CPU's name and thread count."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_device_name()


def cpu_device_name() -> str:
    """For what runs on the CPU of a machine that also has a GPU."""
    import torch

    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def package_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def current_commit() -> str:
    """Short hash of the checked-out commit, with `+` when the tree differs from it; empty outside git."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        answer = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True)
        return answer.stdout.strip() if answer.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return commit + ("+" if commit and git("status", "--porcelain", "--untracked-files=no") else "")
    except OSError:
        return ""
