"""Interpolated Kneser-Ney 4-gram model on the packed rows: what a table of counts reaches on the held-out sets.

    python -m deepinfer.train.ngram_baseline FOLDER/packed

Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling" (1998), one discount an order.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BITS = 13  # a token id of a vocabulary of at most 8192
ORDER = 4


@dataclass(frozen=True)
class Level:
    """Counts of one order: sorted n-grams with their counts, sorted contexts with count sums and distinct followers."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    followers: np.ndarray
    discount: float


def make_level(grams: np.ndarray, counts: np.ndarray) -> Level:
    """A level of sorted n-grams, packed BITS a token, with their counts."""
    contexts, starts = np.unique(grams >> BITS, return_index=True)
    totals = np.add.reduceat(counts, starts)
    followers = np.diff(np.append(starts, len(grams)))
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return Level(grams, counts, contexts, totals, followers, once / max(once + 2 * twice, 1) or 0.5)


def windows(rows: np.ndarray, order: int) -> np.ndarray:
    """n-grams inside rows as int64 keys, the last token in the low bits. rows: [R, L] -> [R, L - order + 1]."""
    length = rows.shape[1] - order + 1
    keys = np.zeros((rows.shape[0], length), np.int64)
    for i in range(order):
        keys = (keys << BITS) | rows[:, i : i + length]
    return keys


def fit(rows: np.ndarray) -> list[Level]:
    """Levels of order 1 to ORDER; the lower ones count distinct left neighbours (Kneser-Ney). rows: int [R, L]."""
    grams, counts = np.unique(windows(rows, ORDER), return_counts=True)
    levels = [make_level(grams, counts)]
    for order in range(ORDER - 1, 0, -1):
        grams, counts = np.unique(levels[0].grams & ((1 << BITS * order) - 1), return_counts=True)
        levels.insert(0, make_level(grams, counts))
    return levels


def find(table: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Value of each key, 0 where the sorted table lacks it."""
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.where(table[at] == keys, values[at], 0)


def probabilities(levels: list[Level], tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """P(token | the ORDER - 1 tokens before it) of every token from index ORDER - 1 on. tokens: int [n]."""
    keys = windows(tokens[None].astype(np.int64), ORDER)[0]
    p = np.full(len(keys), 1.0 / vocab_size)
    for order, level in enumerate(levels, start=1):
        key = keys & ((1 << BITS * order) - 1)
        total = find(level.contexts, key >> BITS, level.totals)
        followers = find(level.contexts, key >> BITS, level.followers)
        count = find(level.grams, key, level.counts)
        known = total > 0
        own = np.maximum(count - level.discount, 0) / np.maximum(total, 1)
        p = np.where(known, own + level.discount * followers / np.maximum(total, 1) * p, p)
    return p


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocab-size", type=int, default=8192)
    args = parser.parse_args()
    rows = np.concatenate([np.load(path) for path in sorted(args.folder.glob("train-*.npy"))])
    levels = fit(rows)
    held_out = np.load(args.folder / "heldout.npz")
    report = {}
    for source in sorted({name.split(".")[0] for name in held_out.files}):
        ids = held_out[f"{source}.ids"]
        targets = np.unpackbits(held_out[f"{source}.targets"])[: len(ids)].astype(bool)[ORDER - 1 :]
        nats = -np.log(probabilities(levels, ids, args.vocab_size))
        scale = len(ids) / len(nats) / np.log(2) / float(held_out[f"{source}.bytes"])
        report[source] = {
            "tokens": len(ids), "nats_per_token": float(nats.mean()),
            "nats_per_target_token": float(nats[targets].mean()), "bits_per_byte": float(nats.sum() * scale),
        }  # fmt: skip
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
