"""Pack documents into rows of fixed length: best fit, no document split across rows unless it is longer than a row."""

from collections.abc import Sequence

import numpy as np

from deepinfer.train.data.documents import Document

LENGTH = 1025  # 1024 inputs and the target of the last one
OPEN_ROWS = 64


def pieces(documents: Sequence[Document]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, targets) no longer than a row."""
    return [(d.ids[i : i + LENGTH], d.targets[i : i + LENGTH]) for d in documents for i in range(0, len(d.ids), LENGTH)]


def assign_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the pieces of each row: each piece goes to the open row that it fills best."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []  # (free tokens, members)
    for i, n in enumerate(lengths):
        fitting = [j for j, (free, _) in enumerate(open_rows) if free >= n]
        if fitting:
            best = min(fitting, key=lambda j: open_rows[j][0])
            free, members = open_rows[best]
            open_rows[best] = (free - n, [*members, i])
            continue
        if len(open_rows) == OPEN_ROWS:
            fullest = min(range(OPEN_ROWS), key=lambda j: open_rows[j][0])
            rows.append(open_rows.pop(fullest)[1])
        open_rows.append((LENGTH - n, [i]))
    return rows + [members for _, members in open_rows]


def pack(documents: Sequence[Document], filler: Sequence[Document], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows uint16 [rows, LENGTH] and targets bool of the same shape, in a seeded order.

    The end of a row that no piece fits is filled with the beginning of a `filler` document (longer than a row's gap or
    followed by another), so rows hold no padding.
    """
    r = np.random.default_rng(seed)
    parts = pieces(documents)
    parts = [parts[i] for i in r.permutation(len(parts))]
    rows = assign_rows([len(ids) for ids, _ in parts])
    packed = np.zeros((len(rows), LENGTH), np.uint16)
    targets = np.zeros((len(rows), LENGTH), bool)
    for row, members in enumerate(rows):
        end = 0
        for ids, flags in (parts[i] for i in members):
            packed[row, end : end + len(ids)], targets[row, end : end + len(ids)] = ids, flags
            end += len(ids)
        while end < LENGTH:
            extra = filler[int(r.integers(len(filler)))]
            n = min(len(extra.ids), LENGTH - end)
            packed[row, end : end + n], targets[row, end : end + n] = extra.ids[:n], extra.targets[:n]
            end += n
    order = r.permutation(len(rows))
    return packed[order], targets[order]
