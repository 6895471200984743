"""From the result files of a training run to result records and the generated part of docs/nano.md.

    python -m deepinfer.train.report --runs benchmarks/nano --document docs/nano.md

Reads training.json (pretrain), held_out_float32.json (evaluate on a CPU), dense_baseline.json, ngram.json,
answers.json, answers_known.json and samples.json.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

from deepinfer.bench.results import Record, measured, save
from deepinfer.config.model import ModelConfig
from deepinfer.train.evaluate import COUNTED_SHARE_OF_TEXT
from deepinfer.train.parameters import parameter_counts

_GENERATED = re.compile(r"(<!-- nano:training -->\n).*?(<!-- /nano:training -->)", re.DOTALL)
TRAIN = "python -m deepinfer.train.pretrain --config deepinfer/checkpoints/nano --data DATA --out OUT --minutes 14"
DENSE = "python -m deepinfer.train.dense_baseline --data DATA --out OUT --tokens 318177280"
ANSWERS = "python -m deepinfer.train.answers --prompts DATA/eval.jsonl --out benchmarks/nano"

Scores = dict[str, dict[str, float]]


class Runs:
    """The result files of one folder."""

    def __init__(self, folder: Path) -> None:
        def read(name: str) -> Any:
            return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))

        self.training, self.dense, self.ngram = read("training"), read("dense_baseline"), read("ngram")
        self.answers, self.known_answers, self.samples = read("answers"), read("answers_known"), read("samples")
        self.float32_scores: Scores = read("held_out_float32")
        self.nano_scores: Scores = self.training["held_out"]
        self.dense_scores: Scores = self.dense["held_out"]
        self.sources = [name for name in self.nano_scores if not name.startswith("all")]

    def is_text(self, source: str) -> bool:
        """Whether every token of the source is a target, so that bits per byte mean something."""
        tokens = self.ngram[source]["tokens"]
        return self.nano_scores[source]["targets"] > COUNTED_SHARE_OF_TEXT * (tokens - 1)

    def ngram_loss(self, source: str) -> float:
        """Nats a target token."""
        return self.ngram[source]["nats_per_target_token"]

    def bits_per_byte(self, scores: Scores, source: str) -> float:
        """Of one source."""
        return scores[source]["bits_per_byte"]

    def mean_loss(self, losses: dict[str, float]) -> float:
        """Over all targets of all sources."""
        targets = {source: self.nano_scores[source]["targets"] for source in self.sources}
        return sum(losses[source] * targets[source] for source in self.sources) / sum(targets.values())

    def text_bits(self, scores: Scores) -> float:
        """Bits per byte of all plain-text sources together."""
        text = [source for source in self.sources if self.is_text(source)]
        bits = {s: scores[s]["loss"] * scores[s]["targets"] / math.log(2) for s in text}
        return sum(bits.values()) / sum(bits[s] / scores[s]["bits_per_byte"] for s in text)

    def ngram_text_bits(self) -> float:
        """As `text_bits`, of the n-grams."""
        text = [source for source in self.sources if self.is_text(source)]
        bits = {s: self.ngram[s]["nats_per_token"] * self.ngram[s]["tokens"] / math.log(2) for s in text}
        return sum(bits.values()) / sum(bits[s] / self.ngram[s]["bits_per_byte"] for s in text)


def records(runs: Runs) -> list[Record]:
    """The measured figures about nano."""
    card, versions = runs.training["device"], {"torch": runs.training["torch"]}

    def on_card(name: str, unit: str, value: float, command: str, **extra: Any) -> Record:
        record = measured(name, part="1", unit=unit, value=value, command=command, device=card, **extra)
        record.versions = versions
        return record

    nano_bits, dense_bits, ngram_bits = (
        runs.text_bits(runs.nano_scores),
        runs.text_bits(runs.dense_scores),
        runs.ngram_text_bits(),
    )
    dense_name, lower = "dense transformer of nano's active size, same tokens", {"higher_is_better": False}
    losses = [{s: scores[s]["loss"] for s in runs.sources} for scores in (runs.nano_scores, runs.dense_scores)]
    bits, nats = "bits/byte", "nats/target"
    result = [
        on_card(
            "nano held-out text", bits, nano_bits, TRAIN, baseline_name=dense_name, baseline_value=dense_bits, **lower
        ),
        on_card(
            "nano held-out text against n-grams",
            bits,
            nano_bits,
            TRAIN,
            baseline_name="Kneser-Ney 4-gram",
            baseline_value=ngram_bits,
            target=1.0,
            **lower,
        ),
        on_card(
            "nano held-out, all sources",
            nats,
            runs.mean_loss(losses[0]),
            TRAIN,
            baseline_name=dense_name,
            baseline_value=runs.mean_loss(losses[1]),
            **lower,
        ),
        on_card("nano training", "tokens/s", runs.training["tokens"] / runs.training["seconds"], TRAIN),
        on_card("dense baseline training", "tokens/s", runs.dense["tokens"] / runs.dense["seconds"], DENSE),
    ]
    for label, answers, prompts in (
        ("new", runs.answers, ANSWERS),
        ("known", runs.known_answers, ANSWERS.replace("eval.jsonl", "eval_seen.jsonl") + " --name answers_known"),
    ):
        kinds = answers["kinds"]
        rates = {f"nano {kind} right, {label} names": figures["rate"] for kind, figures in kinds.items()}
        rates[f"nano tool call valid, {label} tools"] = kinds["tool"]["valid_rate"]
        rates[f"nano tool call parses, {label} tools"] = kinds["tool"]["well_formed_rate"]
        for name, rate in rates.items():
            target = 0.5 if "valid" in name else None  # "a valid tool call on most of a held-out set"
            result.append(measured(name, part="1", unit="share", value=rate, command=prompts, target=target))
    return result


def generated_text(runs: Runs, config: ModelConfig) -> str:
    """Tables and samples between the markers of the document."""
    training, dense = runs.training, runs.dense
    total, active = parameter_counts(config)
    lines = [
        f"{total / 1e6:.1f} million parameters, {active / 1e6:.1f} million used by a token. One {training['device']}, "
        f"torch {training['torch']}: {training['step']:,} steps of {training['batch']} rows of {training['length']:,}, "
        f"{training['tokens'] / 1e6:.0f} million tokens ({training['epochs']:.1f} epochs of {training['rows']:,} rows) "
        f"in {training['seconds']:.0f} s, {training['tokens'] / training['seconds']:,.0f} tokens/s.",
        "",
        "| tokens (million) | learning rate | training loss | index loss | busiest expert / mean |",
        "| --- | --- | --- | --- | --- |",
    ]
    log = training["log"]
    for i in range(10):
        entry = log[(i + 1) * len(log) // 10 - 1]
        lines.append(
            f"| {entry['tokens'] / 1e6:.0f} | {entry['factor']:.2f} | {entry['loss']:.3f} | "
            f"{entry['index_loss']:.3f} | {entry['busiest_expert']:.2f} |"
        )
    lines += [
        "",
        f"Held-out scores, in nats per target token (and bits per byte of plain text). The dense transformer has "
        f"{dense['active_parameters'] / 1e6:.1f} million parameters besides its embedding and saw "
        f"{dense['tokens'] / 1e6:.0f} million tokens of the same rows in the same order, in {dense['seconds']:.0f} s.",
        "",
        "| Source | targets | nano | dense | 4-gram | nano bits/byte | dense bits/byte | 4-gram bits/byte |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for source in runs.sources:
        cells = [runs.nano_scores[source]["loss"], runs.dense_scores[source]["loss"], runs.ngram_loss(source)]
        row = [f"`{source}`", f"{runs.nano_scores[source]['targets']:,.0f}", *(f"{cell:.3f}" for cell in cells)]
        if runs.is_text(source):
            bits = [runs.bits_per_byte(scores, source) for scores in (runs.nano_scores, runs.dense_scores)]
            row += [f"{value:.3f}" for value in (*bits, runs.ngram[source]["bits_per_byte"])]
        else:
            row += [""] * 3
        lines.append("| " + " | ".join(row) + " |")
    means = [{s: scores[s]["loss"] for s in runs.sources} for scores in (runs.nano_scores, runs.dense_scores)]
    means.append({s: runs.ngram_loss(s) for s in runs.sources})
    bits = [runs.text_bits(runs.nano_scores), runs.text_bits(runs.dense_scores), runs.ngram_text_bits()]
    everything = sum(runs.nano_scores[s]["targets"] for s in runs.sources)
    figures = [f"{runs.mean_loss(loss):.3f}" for loss in means] + [f"{value:.3f}" for value in bits]
    lines.append("| " + " | ".join(["all", f"{everything:,.0f}", *figures]) + " |")
    checked = [source for source in runs.float32_scores if source in runs.sources]
    apart = max(abs(runs.float32_scores[s]["loss"] - runs.nano_scores[s]["loss"]) for s in checked)
    lines += [
        "",
        "Nano's scores come from the training code in BF16. The float32 reference model on the stored checkpoint "
        f"gives, for {', '.join(f'`{source}`' for source in checked)}, the same to within {apart:.3f}.",
        "",
        "Greedy answers to evaluation prompts drawn with another seed than training's: with names of people, tools and "
        "sums that training never uses (new), and with those that it does use (known).",
        "",
        "| Kind | asked | right, new | right, known |",
        "| --- | --- | --- | --- |",
    ]
    new, known = runs.answers["kinds"], runs.known_answers["kinds"]
    for kind, counts in new.items():
        lines.append(f"| `{kind}` | {counts['asked']} | {counts['rate']:.1%} | {known[kind]['rate']:.1%} |")
    for label, key in (("call that parses", "well_formed_rate"), ("valid call", "valid_rate")):
        asked = new["tool"]["asked"]
        lines.append(f"| `tool`: {label} | {asked} | {new['tool'][key]:.1%} | {known['tool'][key]:.1%} |")
    lines += [
        "",
        "A valid call names a declared tool with all required parameters and no others; right means equal values too.",
        "",
        "Samples: temperature 0.7, top-p 0.9, seed 0, at most 100 tokens, not selected.",
        "",
    ]
    for sample in runs.samples:
        quoted = f"**{sample['prompt'].strip()}** {sample['completion'].strip()}"
        lines += ["> " + line if line else ">" for line in quoted.split("\n")] + [""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("benchmarks/nano"))
    parser.add_argument("--config", type=Path, default=Path("deepinfer/checkpoints/nano"))
    parser.add_argument("--document", type=Path, default=Path("docs/nano.md"))
    options = parser.parse_args(arguments)
    runs = Runs(options.runs)
    save("nano_training", records(runs))
    text = options.document.read_text(encoding="utf-8")
    if not _GENERATED.search(text):
        raise SystemExit(f"{options.document}: no <!-- nano:training --> markers")
    generated = generated_text(runs, ModelConfig.from_file(options.config))
    options.document.write_text(_GENERATED.sub(lambda m: m[1] + generated + m[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
