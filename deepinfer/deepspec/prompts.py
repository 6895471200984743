"""Prompts for a target to answer, cut from the packed rows that it was trained on: `deepspec prepare` takes them.

    python -m deepinfer.deepspec.prompts --data data/packed --out tasks --count 20000

Chats (chat.jsonl) end where the target would write; of other documents (text.jsonl) the first tokens are taken or, as
often, as many from somewhere inside, behind a begin-of-sequence token. Held-out documents are not in packed rows.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch

from deepinfer.train.batches import Rows, load_rows

TEXT_TOKENS, CHAT_TOKENS = 48, 448  # of a cut; of the longest chat that is asked


def documents(rows: Rows, bos: int = 0) -> Iterator[tuple[list[int], int]]:
    """Every document that begins with `bos`, and how many of its tokens are context that the target does not write."""
    for start in range(0, len(rows), 1024):
        inputs, targets, counted = rows.take(torch.arange(start, min(start + 1024, len(rows))))
        tokens = torch.cat((inputs, targets[:, -1:]), dim=1)
        written = torch.nn.functional.pad(counted, (1, 0)).bool()
        for row, flags in zip(tokens.tolist(), written.tolist(), strict=True):
            starts = [i for i, token in enumerate(row) if token == bos]
            for begin, end in zip(starts, [*starts[1:], len(row)], strict=True):
                context = next((i for i in range(begin, end) if flags[i]), end) - begin
                yield row[begin:end], context


def cut_prompts(rows: Rows, count: int, seed: int = 0, bos: int = 0) -> dict[str, list[list[int]]]:
    """At most `count` prompts of each kind, in random order."""
    generator = random.Random(seed)
    found: dict[str, list[list[int]]] = {"chat": [], "text": []}
    for tokens, context in documents(rows, bos):
        if context > 1:
            if context <= CHAT_TOKENS and context < len(tokens):
                found["chat"].append(tokens[:context])
        elif len(tokens) > 2 * TEXT_TOKENS:
            inside = generator.random() < 0.5
            at = generator.randrange(1, len(tokens) - TEXT_TOKENS) if inside else 1
            found["text"].append([bos, *tokens[at : at + TEXT_TOKENS]])
    for prompts in found.values():
        generator.shuffle(prompts)
    return {kind: prompts[:count] for kind, prompts in found.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders with train-N.npy, targets-N.npy")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20000, help="most prompts of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for kind, prompts in cut_prompts(load_rows(options.data), options.count, options.seed).items():
        lines = [json.dumps({"prompt_ids": prompt}) + "\n" for prompt in prompts]
        (options.out / f"{kind}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{kind}: {len(prompts)} prompts")


if __name__ == "__main__":
    main()
