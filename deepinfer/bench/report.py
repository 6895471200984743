"""The results table: printed by `deepinfer bench report`, and written between markers in the documentation.

A marker pair in README.md or docs/**/*.md names an area of benchmarks/results (or `all`):

    <!-- results:throughput -->
    ... generated ...
    <!-- /results -->

`provenance:` in place of `results:` lists the runs that measured an area: command, commit, date and device.
"""

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.bench.results import RESULTS_DIR, Record, load_all

if TYPE_CHECKING:
    from rich.console import Console

TABLE_WIDTH = 140  # of a terminal in which the table is easier to read than lines
_MARKED = re.compile(r"(<!-- (results|provenance):([\w-]+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
COLUMNS = ("name", "value", "target", "baseline", "ratio", "met", "device")


def figure(value: float) -> str:
    """Three significant digits, grouped thousands, an exponent only for the very large and very small."""
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e9:
        return f"{value:.3g}"
    whole_digits = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(0, 3 - whole_digits)}f}"


def row(record: Record) -> tuple[str, ...]:
    """The cells of one record, in the order of COLUMNS."""
    bound = "≥" if record.higher_is_better else "≤"
    times = " ×" if record.ratio is not None else ""
    target = "—" if record.target is None else f"{bound} {figure(record.target)}{times}"
    baseline = "—"
    if record.baseline_value is not None:
        baseline = f"{figure(record.baseline_value)} {record.unit} ({record.baseline_name})"
    ratio = "—" if record.ratio is None else f"{figure(record.ratio)} ×"
    met = {None: "—", True: "yes", False: "no"}[record.met]
    return record.name, f"{figure(record.value)} {record.unit}", target, baseline, ratio, met, record.device


def markdown_table(records: list[Record]) -> str:
    if not records:
        return "No results have been recorded yet.\n"
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row(record)) + " |" for record in records]
    return "\n".join(lines) + "\n"


def provenance_table(records: list[Record]) -> str:
    """A row for each run (command, commit, device): how many figures are of it, and how many miss their target."""
    runs: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        runs.setdefault((record.command, record.commit, record.device), []).append(record)
    lines = ["| measured by | commit (+: and changes) | date | device | figures | missed |", "|" + "---|" * 6]
    for (command, commit, device), group in runs.items():
        date = max(record.date for record in group)[:10]
        missed = sum(record.met is False for record in group)
        lines.append(f"| `{command}` | {commit or '—'} | {date} | {device} | {len(group)} | {missed or '—'} |")
    return "\n".join(lines) + "\n"


_TABLES: dict[str, Callable[[list[Record]], str]] = {"results": markdown_table, "provenance": provenance_table}


def update_documents(root: Path, results: dict[str, list[Record]], write: bool = True) -> list[Path]:
    """Regenerate the tables in README.md and docs/**/*.md under `root`; the files whose text differs are returned."""
    changed = []
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        if not path.exists():
            continue
        before = path.read_text()
        after = _MARKED.sub(lambda found: found[1] + _TABLES[found[2]](select(results, found[3])) + found[4], before)
        if after != before:
            changed.append(path)
            if write:
                path.write_text(after)
    return changed


def select(results: dict[str, list[Record]], area: str) -> list[Record]:
    """Records of one area, or of every area for `all`."""
    if area == "all":
        return [record for records in results.values() for record in records]
    return results.get(area, [])


def print_report(area: str = "all", directory: Path = RESULTS_DIR) -> list[Record]:
    """Print the table to the terminal, or lines where it is too narrow; the printed records are returned."""
    from rich.console import Console

    records = select(load_all(directory), area)
    console = Console(soft_wrap=False, highlight=False)
    if not records:
        console.print(f"no results in {directory}", markup=False)
    elif console.width < TABLE_WIDTH:
        for text in narrow_report(records, console.width):
            console.print(text, markup=False, style="bold" if text and not text.startswith(" ") else None)
    else:
        _print_table(console, records)
    return records


def _print_table(console: "Console", records: list[Record]) -> None:
    from rich.table import Table

    table = Table(*COLUMNS)
    for record in records:
        colour = {None: "", True: "green", False: "red"}[record.met]
        cells = row(record)
        table.add_row(*cells[:5], f"[{colour}]{cells[5]}[/]" if colour else cells[5], cells[6])
    console.print(table)


def narrow_report(records: list[Record], width: int) -> list[str]:
    """Lines of at most `width` characters, unless a word is longer: a heading a device, then each record."""
    lines: list[str] = []

    def wrapped(text: str, indent: int) -> list[str]:
        space = " " * indent
        return textwrap.wrap(text, width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False)

    by_device: dict[str, list[Record]] = {}
    for record in records:
        by_device.setdefault(record.device, []).append(record)
    for device, group in by_device.items():
        lines += ["", *wrapped(device, 0)] if lines else wrapped(device, 0)
        for record in group:
            _, value, target, baseline, ratio, met, _ = row(record)
            figures = [value]
            figures += [f"{ratio} of {baseline}"] if record.ratio is not None else []
            if record.target is not None:
                figures.append(f"target {target}: {'met' if met == 'yes' else 'not met'}")
            lines += [*wrapped(record.name, 2), *wrapped(", ".join(figures), 6)]
    return lines
