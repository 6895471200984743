"""Packed rows on the device: token ids and which of them are training targets, visited in a seeded order."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """ids: int16 [rows, L], the bits of uint16 token ids. targets: uint8 [rows, ceil(L / 8)], first bit highest."""

    ids: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return self.ids.shape[0]

    def to(self, device: str) -> Rows:
        """On another device."""
        return Rows(self.ids.to(device), self.targets.to(device))

    def take(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs and targets int64 [B, L - 1], and float32 weights [B, L - 1]: 1 where the target counts."""
        ids = self.ids[index].to(torch.int64) & 0xFFFF
        shift = 7 - torch.arange(8, device=ids.device, dtype=torch.uint8)
        bits = ((self.targets[index].unsqueeze(-1) >> shift) & 1).flatten(1)[:, 1 : ids.shape[1]]
        return ids[:, :-1], ids[:, 1:], bits.float()


def _read(path: Path) -> np.ndarray:
    if path.suffix != ".xz":
        return np.load(path)
    with lzma.open(path) as file:
        return np.load(file)


def load_rows(folders: list[Path]) -> Rows:
    """All train-N.npy[.xz] of the folders with their targets-N.npy[.xz].

    Raises:
        ValueError: there are none, or the two disagree.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("train-*.npy*")):
            found.setdefault(path.name.removesuffix(".xz"), path)
    if not found:
        raise ValueError(f"data: no train-N.npy in {', '.join(map(str, folders))}")
    ids, targets = [], []
    for path in found.values():
        ids.append(_read(path))
        targets.append(_read(path.with_name(path.name.replace("train", "targets", 1))))
        if targets[-1].shape != (ids[-1].shape[0], -(-ids[-1].shape[1] // 8)):
            raise ValueError(f"{path}: targets have shape {targets[-1].shape}, tokens {ids[-1].shape}")
    return Rows(torch.from_numpy(np.concatenate(ids).view(np.int16)), torch.from_numpy(np.concatenate(targets)))


class Batches:
    """Endless batches over all rows: every epoch is a new permutation, drawn from the seed and the epoch number."""

    def __init__(self, rows: Rows, batch: int, seed: int) -> None:
        if len(rows) < batch:
            raise ValueError(f"batch: {batch}, allowed: at most the number of rows, {len(rows)}")
        self.rows, self.batch, self.seed = rows, batch, seed
        self.per_epoch = len(rows) // batch

    def from_step(self, step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(inputs, targets, weights) [batch, L - 1] of step, step + 1, ..."""
        while True:
            epoch, start = divmod(step, self.per_epoch)
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.rows), generator=generator).to(self.rows.ids.device)
            for i in range(start, self.per_epoch):
                yield self.rows.take(order[i * self.batch : (i + 1) * self.batch])
                step += 1
