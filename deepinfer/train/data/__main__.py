"""Build nano's tokenizer, packed training rows, held-out sets and evaluation prompts.

    python -m deepinfer.train.data FOLDER [--tokenizer deepinfer/checkpoints/nano/tokenizer.json]

FOLDER/smollm holds the sampler's shards and FOLDER/x the unpacked source packages; results go to FOLDER/packed.
"""

import argparse
import json
import lzma
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as RawTokenizer

from deepinfer.models.layers.engram_map import compressed_token_map
from deepinfer.recipe.tokenizer import Tokenizer
from deepinfer.train.data import documents as docs
from deepinfer.train.data import sources
from deepinfer.train.data.evaluation import evaluation_records
from deepinfer.train.data.pack import LENGTH, pack
from deepinfer.train.data.tokenizer import train_tokenizer

SHARDS = 2


def dialogue_job(tokenizer_path: Path, job: tuple[str, int, int]) -> list[docs.Document]:
    return docs.dialogue_documents(*job, Tokenizer.from_file(tokenizer_path))


def all_documents(
    pairs: list[tuple[str, str]], samples: list[sources.Sample], tokenizer_path: Path, workers: int
) -> list[docs.Document]:
    tokenizer = Tokenizer.from_file(tokenizer_path)
    with Pool(workers) as pool:
        parts = pool.imap(partial(dialogue_job, tokenizer_path), docs.dialogue_jobs())
        result = [*docs.text_documents(pairs, tokenizer), *docs.sample_documents(samples, tokenizer)]
        result += [d for part in parts for d in part]
    # A dialogue cut in two teaches nothing; a long text is cut by the packer.
    return [d for d in result if len(d.ids) <= LENGTH or d.targets[1:].all()]


def write_xz(path: Path, array: np.ndarray) -> None:
    with lzma.open(path.with_suffix(".npy.xz"), "wb", preset=2) as f:
        np.save(f, array)


def write_packed(folder: Path, documents: Sequence[docs.Document]) -> dict[str, object]:
    """train-N.npy [rows, 1025] uint16, targets-N.npy [rows, 129] uint8 (np.packbits), each also as .xz; heldout.npz."""
    train = [d for d in documents if not d.held_out]
    rows, targets = pack(train, [d for d in train if d.source == "story"], seed=docs.SEED)
    for i, (ids, flags) in enumerate(zip(np.array_split(rows, SHARDS), np.array_split(targets, SHARDS), strict=True)):
        for name, array in (("train", ids), ("targets", np.packbits(flags, axis=1))):
            np.save(folder / f"{name}-{i}.npy", array)
            write_xz(folder / f"{name}-{i}.npy", array)
    held_out: dict[str, np.ndarray] = {}
    report: dict[str, dict[str, float]] = {}
    for source in sorted({d.source for d in documents}):
        mine = [d for d in documents if d.source == source]
        kept = [d for d in mine if d.held_out]
        if kept:
            held_out[f"{source}.ids"] = np.concatenate([d.ids for d in kept])
            held_out[f"{source}.targets"] = np.packbits(np.concatenate([d.targets for d in kept]))
        tokens = Counter({held: sum(len(d.ids) for d in mine if d.held_out == held) for held in (False, True)})
        held_out[f"{source}.bytes"] = np.array(sum(d.size for d in kept))
        report[source] = {
            "documents": len(mine), "train_tokens": tokens[False], "heldout_tokens": tokens[True],
            "bytes_per_token": sum(d.size for d in mine) / (tokens[False] + tokens[True]),
            "target_share": float(sum(d.targets.sum() for d in mine) / (tokens[False] + tokens[True])),
        }  # fmt: skip
    np.savez_compressed(folder / "heldout.npz", allow_pickle=False, **held_out)
    return {"rows": len(rows), "tokens": int(rows.size), "target_share": float(targets.mean()), "sources": report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=Path("deepinfer/checkpoints/nano/tokenizer.json"))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    pairs = list(sources.text_documents(args.folder / "x"))
    samples = sources.load_samples(args.folder / "smollm")
    print(f"{len(pairs)} texts, {len(samples)} samples", flush=True)
    if not args.tokenizer.exists():
        args.tokenizer.parent.mkdir(parents=True, exist_ok=True)
        definition = train_tokenizer(docs.tokenizer_texts(pairs, samples))
        args.tokenizer.write_text(json.dumps(definition, ensure_ascii=False, indent=0), encoding="utf-8")
    compressed = compressed_token_map(RawTokenizer.from_file(str(args.tokenizer)))
    print(f"compressed token map: {int(compressed.max()) + 1} distinct keys", flush=True)
    packed = args.folder / "packed"
    packed.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(args.tokenizer)
    for name, held_out in (("eval.jsonl", True), ("eval_seen.jsonl", False)):
        records = evaluation_records(tokenizer, held_out)
        (packed / name).write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    report = write_packed(packed, all_documents(pairs, samples, args.tokenizer, args.workers))
    report["compressed_vocab_size"] = int(compressed.max()) + 1
    (packed / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
