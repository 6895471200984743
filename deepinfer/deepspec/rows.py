"""Training rows and the target's hidden states for them: computed once and kept in shards, or at every step.

A row is one answer with its prompt, padded to a fixed length; `counted` marks the tokens that the target wrote. The
cache of hidden states is what takes space: (taps + final state) x hidden size x 2 bytes a token, tens of terabytes for
a data set of a large model. `cache_bytes` says so before anything is computed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepinfer.deepspec.acceptance import Answer
from deepinfer.deepspec.answers import check_tokens
from deepinfer.deepspec.files import save_whole
from deepinfer.deepspec.targets import Shape, Target


@dataclass(frozen=True)
class Rows:
    """tokens int64 [N, T + 1]; counted float32 [N, T], 1 where tokens[:, t + 1] was written by the target."""

    tokens: Tensor
    counted: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Batch:
    """Rows with their hidden states."""

    tokens: Tensor  # int64 [R, T + 1]
    counted: Tensor  # float32 [R, T]
    taps: Tensor  # [R, T, n * D]
    hidden: Tensor  # [R, T, D]


def rows_of(answers: list[Answer], length: int) -> Rows:
    """One row an answer, cut to length + 1 tokens or padded with token 0.

    Raises:
        ValueError: no answer has a token that counts.
    """
    tokens = torch.zeros(len(answers), length + 1, dtype=torch.int64)
    counted = torch.zeros(len(answers), length)
    for row, answer in enumerate(answers):
        ids = answer.token_ids[: length + 1]
        tokens[row, : len(ids)] = torch.tensor(ids)
        counted[row, max(len(answer.token_ids) - answer.num_answer - 1, 0) : len(ids) - 1] = 1
    keep = counted.any(1)
    if not keep.any():
        raise ValueError(f"length: {length}, allowed: more tokens than the prompts have")
    return Rows(tokens[keep], counted[keep])


def cache_bytes(num_rows: int, length: int, shape: Shape) -> int:
    """Size of the hidden-state cache: BF16 taps and final states, and the tokens."""
    return num_rows * length * ((shape.num_taps + 1) * shape.hidden_size * 2 + 12)


def write_cache(
    folder: Path,
    rows: Rows,
    target: Target,
    rows_a_shard: int,
    advance: Callable[[int], None] = lambda count: None,
    rank: int = 0,
    ranks: int = 1,
    name: str = "",
) -> list[Path]:
    """Compute and store the hidden states of all rows; shards that are there and whole are kept, those of others go.

    Process `rank` of `ranks` computes every so many-th shard, and moves the bar by as many as all of them do. `name` is
    the target's fingerprint, which is kept in every shard.

    Raises:
        ValueError: the disk has too little room, or a row has a token that the target does not know.
    """
    check_tokens(int(rows.tokens.max()), target.shape.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    device = target.embed.device
    starts = range(0, len(rows), rows_a_shard)
    paths = [folder / f"shard-{i:05d}-of-{len(starts):05d}.safetensors" for i in range(len(starts))]
    for stale in set(folder.glob("shard-*.safetensors")) - set(paths):  # of another number: nobody would know whose
        stale.unlink(missing_ok=True)
    mine = list(zip(paths, starts, strict=True))[rank::ranks]
    missing = [(path, start) for path, start in mine if not _is_whole(path, rows, start, name)]
    advance(ranks * (len(mine) - len(missing)))
    needed = cache_bytes(len(missing) * rows_a_shard, rows.counted.shape[1], target.shape)
    check_room(folder, needed)
    for path, start in missing:
        tokens, counted = (t[start : start + rows_a_shard] for t in (rows.tokens, rows.counted))
        taps, hidden = target(tokens[:, :-1].to(device))
        states = {"taps": taps.to(torch.bfloat16).cpu(), "hidden": hidden.to(torch.bfloat16).cpu()}
        own = {"tokens": tokens.contiguous(), "counted": counted.contiguous()}
        save_whole(path, {**own, **states}, {"target": name})
        advance(ranks)
    return paths


def check_room(folder: Path, needed: int) -> None:
    """That `needed` bytes fit onto the disk of `folder`.

    Raises:
        ValueError: they do not.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(f"cache: {needed >> 20:,} MiB to write, {free >> 20:,} MiB free in {folder}")


def _is_whole(path: Path, rows: Rows, start: int, name: str) -> bool:
    """Whether a shard can be read, holds these tokens and is of this target."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as shard:
            tokens = shard.get_tensor("tokens")
            whose, names = (shard.metadata() or {}).get("target", ""), set(shard.keys())
    except (SafetensorError, OSError):
        return False
    same = torch.equal(tokens, rows.tokens[start : start + len(tokens)])
    return same and whose == name and names == {"tokens", "counted", "taps", "hidden"}


def shard_sizes(paths: list[Path], shape: Shape | None = None, name: str = "") -> tuple[list[int], int]:
    """Rows of each shard, and the length of their rows.

    Args:
        shape, name: of the target whose hidden states they must be.

    Raises:
        ValueError: a shard cannot be read, is of another target, or one of them is missing.
    """
    again = "; `deepinfer deepspec prepare --cache` goes on"
    number = int(paths[0].stem.rsplit("-", 1)[1])
    if len(paths) != number:
        raise ValueError(f"cache: {len(paths)} shards of {number} in {paths[0].parent}{again}")
    sizes, length = [], 0
    for path in paths:
        try:
            with safe_open(path, framework="pt") as shard:
                size, length = shard.get_slice("counted").get_shape()
                widths = [shard.get_slice(part).get_shape()[-1] for part in ("taps", "hidden")]
                whose = (shard.metadata() or {}).get("target", "")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cache: {path} cannot be read ({error}){again}") from None
        fits = shape is None or widths == [shape.num_taps * shape.hidden_size, shape.hidden_size]
        if not fits or (name and whose != name):
            raise ValueError(f"cache: {path} has the hidden states of another target{again} with this one")
        sizes.append(size)
    return sizes, length


def cached_batches(
    paths: list[Path], batch: int, seed: int, rank: int, ranks: int, device: str, first: int = 0
) -> Iterator[Batch]:
    """Endless batches of `batch` rows for process `rank` of `ranks`, from number `first` on; shard by shard, in a new
    order every epoch."""
    sizes, whole = shard_sizes(paths)[0], batch * ranks
    if max(sizes) < whole:
        raise ValueError(f"batch: {batch} rows of {ranks} processes, allowed: at most {max(sizes)} rows a shard")
    number = epoch = 0
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        for index in torch.randperm(len(paths), generator=generator).tolist():
            order = torch.randperm(sizes[index], generator=generator)
            count = len(order) // whole
            if number + count <= first:
                number += count
                continue
            with safe_open(paths[index], framework="pt", device="cpu") as shard:
                parts = {name: shard.get_tensor(name) for name in ("tokens", "counted", "taps", "hidden")}
            for start in range(0, count * whole, whole):
                number += 1
                if number > first:
                    mine = order[start + rank : start + whole : ranks]
                    yield Batch(**{name: value[mine].to(device) for name, value in parts.items()})
        epoch += 1


def computed_batches(
    rows: Rows, target: Target, batch: int, seed: int, rank: int, ranks: int, first: int = 0
) -> Iterator[Batch]:
    """The same from rows alone: the target runs at every step and nothing is stored."""
    whole = batch * ranks
    if len(rows) < whole:
        raise ValueError(f"batch: {batch} rows of {ranks} processes, allowed: at most {len(rows)} rows")
    check_tokens(int(rows.tokens.max()), target.shape.vocab_size)
    device, per_epoch = target.embed.device, len(rows) // whole
    epoch, skipped = divmod(first, per_epoch)
    while True:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        for start in range(skipped * whole, per_epoch * whole, whole):
            mine = order[start + rank : start + whole : ranks]
            tokens = rows.tokens[mine].to(device)
            taps, hidden = target(tokens[:, :-1])
            yield Batch(tokens, rows.counted[mine].to(device), taps, hidden)
        epoch, skipped = epoch + 1, 0
