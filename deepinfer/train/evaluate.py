"""Held-out loss and bits per byte of an exported checkpoint, source by source, through the reference model.

    python -m deepinfer.train.evaluate --model deepinfer/checkpoints/nano --data DATA --out OUT [--device cuda]

Each source's held-out documents are read as one stream in rows of the training length. Only counted targets enter the
loss (in dialogues: what the assistant wrote). Bits per byte are given where every byte of the text is predicted.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.train.batches import Rows

TokenLosses = Callable[[Tensor, Tensor], Tensor]
COUNTED_SHARE_OF_TEXT = 0.95  # a source with fewer counted targets is not plain text


@dataclass(frozen=True)
class HeldOut:
    """Rows of all sources, which source each row belongs to, and the bytes and tokens of each source."""

    rows: Rows
    source_of_row: list[str]
    bytes_of: dict[str, int]
    tokens_of: dict[str, int]


def load_held_out(folders: list[Path], length: int, only: list[str] | None = None) -> HeldOut:
    """heldout.npz of the first folder that has one: <source>.ids, <source>.targets (bits), <source>.bytes."""
    path = next((folder / "heldout.npz" for folder in folders if (folder / "heldout.npz").exists()), None)
    if path is None:
        raise ValueError(f"data: no heldout.npz in {', '.join(map(str, folders))}")
    archive = np.load(path)
    sources = sorted(name.removesuffix(".ids") for name in archive.files if name.endswith(".ids"))
    ids_rows, target_rows, owners, sizes, lengths = [], [], [], {}, {}
    for source in only or sources:
        ids = archive[f"{source}.ids"]
        lengths[source] = len(ids)
        flags = np.unpackbits(archive[f"{source}.targets"])[: len(ids)]
        sizes[source] = int(archive[f"{source}.bytes"])
        for start in range(0, len(ids) - 1, length):  # the last token of a row is the first of the next one
            row, flag = np.zeros(length + 1, np.uint16), np.zeros(length + 1, np.uint8)
            part = ids[start : start + length + 1]
            row[: len(part)], flag[: len(part)] = part, flags[start : start + length + 1]
            ids_rows.append(row)
            target_rows.append(np.packbits(flag))
            owners.append(source)
    rows = Rows(torch.from_numpy(np.stack(ids_rows).view(np.int16)), torch.from_numpy(np.stack(target_rows)))
    return HeldOut(rows, owners, sizes, lengths)


def held_out_scores(losses: TokenLosses, held_out: HeldOut, batch: int, device: str) -> dict[str, dict[str, float]]:
    """Per source, and "all": targets, loss (nats per counted target) and, for plain text, bits_per_byte."""
    rows = held_out.rows.to(device)
    nats: dict[str, float] = {}
    counted_of: dict[str, float] = {}
    for start in range(0, len(rows), batch):
        index = torch.arange(start, start + batch, device=device).clamp(max=len(rows) - 1)  # one shape for all batches
        inputs, targets, counted = rows.take(index)
        per_row = (losses(inputs, targets).detach() * counted).sum(-1).tolist()
        for i, owner in enumerate(held_out.source_of_row[start : start + batch]):
            nats[owner] = nats.get(owner, 0.0) + per_row[i]
            counted_of[owner] = counted_of.get(owner, 0.0) + float(counted[i].sum())
    scores = {}
    nats = {source: value for source, value in nats.items() if counted_of[source]}
    text = [s for s in nats if counted_of[s] > COUNTED_SHARE_OF_TEXT * (held_out.tokens_of[s] - 1)]
    for source in nats:
        scores[source] = {"targets": counted_of[source], "loss": nats[source] / counted_of[source]}
        if source in text:
            scores[source]["bits_per_byte"] = nats[source] / math.log(2) / held_out.bytes_of[source]
    scores["all"] = {"targets": sum(counted_of.values()), "loss": sum(nats.values()) / sum(counted_of.values())}
    if text:
        bits = sum(nats[s] for s in text) / math.log(2)
        scores["all text"] = {
            "targets": sum(counted_of[s] for s in text),
            "loss": sum(nats[s] for s in text) / sum(counted_of[s] for s in text),
            "bits_per_byte": bits / sum(held_out.bytes_of[s] for s in text),
        }
    return scores


def nano_losses(folder: Path, config: ModelConfig, device: str, dtype: torch.dtype) -> TokenLosses:
    """Token losses of an exported checkpoint through the reference model, with the cache formats simulated."""
    from deepinfer.models import reference
    from deepinfer.models.loader import load_weights
    from deepinfer.train.export import token_map_of

    weights = load_weights(folder, config, dtype, device)
    token_map = token_map_of(folder, config).to(device)

    @torch.no_grad()
    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        numerics = reference.Numerics(quantize_kv=True)
        rows = []
        for tokens, wanted in zip(inputs.split(4), targets.split(4), strict=True):  # dense scores: few rows at a time
            logits = reference.forward(weights, config, tokens, token_map, numerics=numerics)
            rows.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none"))
        return torch.cat(rows)

    return losses


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", help="folders, one with heldout.npz")
    parser.add_argument("--out", type=Path, required=True, help="held_out.json is written here")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--sources", nargs="+", help="only these")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    try:
        if not options.data:
            raise ValueError("--data must name the folders of the training data, one with heldout.npz (docs/nano.md)")
        config = ModelConfig.from_file(options.model)
        held_out = load_held_out(options.data, options.length, options.sources)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {' '.join(str(error).split())}\n")
    dtype = torch.bfloat16 if options.device != "cpu" else torch.float32
    losses = nano_losses(options.model, config, options.device, dtype)
    scores = held_out_scores(losses, held_out, 1 if options.device == "cpu" else 64, options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "held_out.json").write_text(json.dumps(scores, indent=1) + "\n")
    print(json.dumps(scores, indent=1))


if __name__ == "__main__":
    main()
