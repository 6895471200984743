"""Packed rows of tokens: uint16 [rows, length + 1] files, kept on the device and visited in a seeded order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def load_rows(path: Path, length: int) -> Tensor:
    """One packed file -> int16-stored uint16 rows [rows, length + 1] (use `tokens_of` to read them).

    Raises:
        ValueError: the file is not a whole number of rows.
    """
    flat = np.load(path) if path.suffix == ".npy" else np.fromfile(path, dtype=np.uint16)
    if flat.size % (length + 1):
        raise ValueError(f"{path}: {flat.size} tokens, allowed: a multiple of {length + 1}")
    return torch.from_numpy(flat.reshape(-1, length + 1).astype(np.uint16).view(np.int16))


def tokens_of(rows: Tensor) -> Tensor:
    """int16-stored rows -> int64 token ids."""
    return rows.to(torch.int64) & 0xFFFF


class Batches:
    """Endless batches over all rows: every epoch is a new permutation, drawn from the seed and the epoch number."""

    def __init__(self, rows: Tensor, batch: int, seed: int) -> None:
        if rows.shape[0] < batch:
            raise ValueError(f"batch: {batch}, allowed: at most the number of rows, {rows.shape[0]}")
        self.rows, self.batch, self.seed = rows, batch, seed
        self.per_epoch = rows.shape[0] // batch

    def from_step(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets) int64 [batch, length] of step, step + 1, ..."""
        while True:
            epoch, start = divmod(step, self.per_epoch)
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(self.rows.shape[0], generator=generator).to(self.rows.device)
            for i in range(start, self.per_epoch):
                tokens = tokens_of(self.rows[order[i * self.batch : (i + 1) * self.batch]])
                yield tokens[:, :-1], tokens[:, 1:]
                step += 1
