"""From the results of `deepspec eval` and `calibrate` to records and the generated parts of the documents.

    python -m deepinfer.train.draft_report --evals T0 T1 DRAWN --calibration CALIBRATION

EVAL folders hold eval.json, the one of --calibration holds calibration.json; --runs keeps their figures, and holds the
logs of the training runs that made the head, draft_training*.json in their order.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from deepinfer.bench.results import RESULTS_DIR, Record, cpu_device_name, measured, save

_GENERATED = re.compile(r"(<!-- nano:(drafts|draft_training) -->\n).*?(<!-- /nano:\2 -->)", re.DOTALL)
EVAL = "deepinfer deepspec eval --target nano --tasks benchmarks/nano/draft_prompts --max-tokens 128 --out OUT"
LENGTH_WANTED, ERROR_ALLOWED = 2.2, 0.06
SETS = {"prose": "prose", "code": "code", "tool": "tool calls", "all": "all"}


def label(run: dict[str, Any]) -> str:
    """How the answers and drafts of an eval.json were made."""
    return f"temperature {run['temperature']:g}" + (", drafts drawn" if run["drawn"] else "")


def command(run: dict[str, Any], name: str) -> str:
    """What makes such an eval.json."""
    what = EVAL if name in SETS else EVAL.replace("benchmarks/nano/draft_prompts", "TASKS")
    return f"{what} --temperature {run['temperature']:g}" + (" --drawn" if run["drawn"] else "")


def own_sets(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sets of a run; of other task sets than nano's without their sum."""
    return {name: row for name, row in run["sets"].items() if name != "all" or set(SETS) <= set(run["sets"])}


def records(runs: list[dict[str, Any]], calibration: dict[str, Any]) -> list[Record]:
    """Of every set of every run, and of the confidences. The target length is that of greedy answers."""
    known: dict[str, Any] = {"part": "5", "unit": "tokens", "device": cpu_device_name()}
    found = []
    for run in runs:
        for name, row in own_sets(run).items():
            target = LENGTH_WANTED if run["temperature"] == 0 and name in SETS else None
            text = f"mean accepted length, {SETS.get(name, name)}, {label(run)}"
            about = known | {"command": command(run, name)}
            found.append(measured(f"{text} (nano's head)", value=row["mean_length"], target=target, **about))
            if not run["drawn"]:  # prompt lookup draws nothing: it would be the run before, once more
                found.append(measured(f"{text} (prompt lookup)", value=row["prompt_lookup"], **about))
    error = calibration["expected_calibration_error"]["calibrated"]
    about = known | {"unit": "share", "higher_is_better": False, "command": EVAL.replace("eval", "calibrate")}
    found.append(measured("expected calibration error of survival", value=error, target=ERROR_ALLOWED, **about))
    return found


def document(runs: list[dict[str, Any]], calibration: dict[str, Any]) -> str:
    """The table of accepted lengths, and how well the confidences are calibrated."""
    lines = [
        "| nano's head (prompt lookup), 5 drafts | rounds | " + " | ".join(SETS.values()) + " |",
        "| --- |" + " --- |" * (1 + len(SETS)),
    ]
    for run in runs:
        sets = own_sets(run)
        cells = {name: f"{row['mean_length']:.2f} ({row['prompt_lookup']:.2f})" for name, row in sets.items()}
        if "all" in sets:
            ours = " | ".join(cells[name] for name in SETS)
            lines.append(f"| {label(run)} | {sets['all']['rounds']:,} | {ours} |")
        for name in sets.keys() - SETS.keys():
            lines.append(f"| {name}, {label(run)} | {sets[name]['rounds']:,} | | | | {cells[name]} |")
    errors = calibration["expected_calibration_error"]
    text = (
        f"The expected calibration error on {calibration['blocks']:,} blocks of answers that were not fitted on is "
        f"{errors['as trained']:.3f} as trained and {errors['calibrated']:.3f} calibrated."
    )
    drawn = calibration["drawn_length"]
    text += (
        f"\nOver all positions of those at temperature 1, {drawn['as trained']:.2f} tokens a round are accepted if "
        f"drafts are drawn as trained, and\n{drawn['calibrated']:.2f} at the draft temperature of "
        f"{calibration['draft_temperature']:g}."
    )
    return "\n".join([*lines, "", text, ""])


def training(logs: list[dict[str, Any]]) -> str:
    """The runs that made the head, one behind the other."""
    lines = [
        "| run | rows | tokens of a row | steps of rows x blocks | tokens read | epochs | seconds | device |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for number, log in enumerate(logs, 1):
        width = log["tokens"] // log["step"] // log["batch"] - 1
        lines.append(
            f"| {number} | {log['rows']:,} | {width:,} | {log['step']:,} of {log['batch']} x {log['anchors']} | "
            f"{log['tokens'] / 1e6:.0f} million | {log['epochs']:.1f} | {log['seconds']:.0f} | {log['device']} |"
        )
    return "\n".join([*lines, ""])


def fill(path: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of `name`.

    Raises:
        ValueError: the document does not have them once.
    """
    document = path.read_text(encoding="utf-8")
    found = [match for match in _GENERATED.finditer(document) if match[2] == name]
    if len(found) != 1:
        raise ValueError(f"document: {path} must have one <!-- nano:{name} --> part, has {len(found)}")
    (match,) = found
    path.write_text(document[: match.start()] + match[1] + text + match[3] + document[match.end() :], encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evals", type=Path, nargs="+", required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("benchmarks/nano"))
    parser.add_argument("--results", type=Path, default=RESULTS_DIR)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args(arguments)
    runs = [json.loads((folder / "eval.json").read_text()) for folder in options.evals]
    for run in runs:
        for row in run["sets"].values():
            row.pop("speed_up")  # of a machine that did other things too
    calibration = json.loads((options.calibration / "calibration.json").read_text())
    logs = [json.loads(path.read_text()) for path in sorted(options.runs.glob("draft_training*.json"))]
    for name, figures in (("draft_acceptance", runs), ("draft_calibration", calibration)):
        (options.runs / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    save("drafts", records(runs, calibration), options.results)
    fill(options.docs / "speculation.md", "drafts", document(runs, calibration))
    fill(options.docs / "nano.md", "draft_training", training(logs))


if __name__ == "__main__":
    main()
