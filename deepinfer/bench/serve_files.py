"""Workloads of `deepinfer bench serve` from files in the formats of vLLM's `custom` and `burstgpt` datasets."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deepinfer.bench.serve_workload import Request, random_text, read_lines, take

DEFAULT_OUTPUT_LEN = 256


def custom_requests(path: Path, num_prompts: int | None, output_len: int | None) -> list[Request]:
    """One JSON object a line: `prompt`, and `output_tokens`, which `output_len` overrides.

    In the file's order, repeated when it is shorter than `num_prompts`.  Raises ValueError naming a bad line.
    """
    requests = []
    for number, entry in read_lines(path):
        prompt, tokens = entry.get("prompt"), output_len or entry.get("output_tokens", DEFAULT_OUTPUT_LEN)
        if not isinstance(prompt, str) or not prompt or not isinstance(tokens, int) or tokens < 1:
            message = "needs a prompt, and output_tokens of at least 1 if it has any"
            raise ValueError(f"--dataset-path {path}, line {number}: {message}")
        requests.append(Request(prompt, tokens))
    return take(requests, num_prompts, path)


def burstgpt_requests(
    path: Path, num_prompts: int | None, words: Sequence[str], draw: np.random.Generator
) -> list[Request]:
    """Random words, as many as BurstGPT's CSV says in `Request tokens`; answers of `Response tokens`.

    Rows without an answer (failed requests) are left out.  Raises ValueError for another shape.
    """
    with path.open(newline="") as file:
        try:
            sizes = [(int(row["Request tokens"]), int(row["Response tokens"])) for row in csv.DictReader(file)]
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(f"--dataset-path {path}: not a BurstGPT file ({error!r})") from None
    chosen = take([size for size in sizes if min(size) > 0], num_prompts, path)
    return [Request(random_text(words, prompt_len, draw), answer_len) for prompt_len, answer_len in chosen]
