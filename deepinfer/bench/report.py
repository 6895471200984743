"""The results table: printed by `deepinfer bench report`, and written between markers in the documentation.

A marker pair in README.md or docs/*.md names an area of benchmarks/results (or `all`):

    <!-- results:throughput -->
    ... generated ...
    <!-- /results -->
"""

import re
from pathlib import Path

from deepinfer.bench.results import RESULTS_DIR, Record, load_all

_MARKED = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)
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


def update_documents(root: Path, results: dict[str, list[Record]], write: bool = True) -> list[Path]:
    """Regenerate the tables in README.md and docs/*.md under `root`; the files whose text differs are returned."""
    changed = []
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        if not path.exists():
            continue
        before = path.read_text()
        after = _MARKED.sub(lambda match: match[1] + markdown_table(select(results, match[2])) + match[3], before)
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
    """Print the table to the terminal; the printed records are returned."""
    from rich.console import Console
    from rich.table import Table

    records = select(load_all(directory), area)
    table = Table(*COLUMNS, title=None if records else f"no results in {directory}")
    for record in records:
        colour = {None: "", True: "green", False: "red"}[record.met]
        cells = row(record)
        table.add_row(*cells[:5], f"[{colour}]{cells[5]}[/]" if colour else cells[5], cells[6])
    Console(soft_wrap=False).print(table)
    return records
