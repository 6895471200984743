"""Answers that a target wrote, packed into rows: training of a V4.1 head reads several answers of one row at once."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from deepinfer.deepspec.acceptance import Answer
from deepinfer.deepspec.answers import read_folder
from deepinfer.train.batches import Rows, load_rows


def pack_answers(answers: list[Answer], length: int, seed: int = 0) -> Rows:
    """Rows of length + 1 tokens, answers with their prompts one behind the other in a random order; targets are what
    the target wrote. What does not fit into a row of its own is left out.

    Raises:
        ValueError: no answer fits, or a token has no place in 16 bits.
    """
    fitting = [answer for answer in answers if len(answer.token_ids) <= length + 1]
    if not fitting:
        raise ValueError(f"length: {length}, allowed: more than the shortest answer and its prompt have")
    highest = max(max(answer.token_ids) for answer in fitting)
    if highest > 0xFFFF:
        raise ValueError(f"data: token id {highest}, allowed: below 65,536, what packed rows hold")
    random.Random(seed).shuffle(fitting)
    rows: list[tuple[list[int], list[int]]] = [([], [])]
    for answer in fitting:
        if len(rows[-1][0]) + len(answer.token_ids) > length + 1:
            rows.append(([], []))
        rows[-1][0].extend(answer.token_ids)
        rows[-1][1].extend([0] * (len(answer.token_ids) - answer.num_answer) + [1] * answer.num_answer)
    ids = np.zeros((len(rows), length + 1), np.uint16)
    written = np.zeros((len(rows), length + 1), np.uint8)
    for row, (tokens, flags) in enumerate(rows):
        ids[row, : len(tokens)], written[row, : len(flags)] = tokens, flags
    return Rows(torch.from_numpy(ids.view(np.int16)), torch.from_numpy(np.packbits(written, axis=1)))


def training_rows(folders: list[Path], length: int, seed: int = 0, target: str = "") -> Rows:
    """Rows of folders that `deepspec prepare` wrote (their answers, packed) or that hold train-N.npy (as they are).

    `target` as `read_folder` takes it.

    Raises:
        ValueError: a folder holds neither, answers are another target's, or the rows differ in length.
    """
    prepared = [folder for folder in folders if (folder / "answers").is_dir()]
    packed = [folder for folder in folders if folder not in prepared]
    parts = [load_rows(packed)] if packed else []
    if prepared:
        parts.append(
            pack_answers([answer for folder in prepared for answer in read_folder(folder, target)], length, seed)
        )
    widths = {part.ids.shape[1] for part in parts}
    if widths != {length + 1}:
        raise ValueError(f"length: {length}, the rows in --data have {', '.join(str(w - 1) for w in sorted(widths))}")
    return Rows(torch.cat([part.ids for part in parts]), torch.cat([part.targets for part in parts]))
