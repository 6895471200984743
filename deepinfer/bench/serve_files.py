"""Workloads of `deepinfer bench serve` from files in the formats of vLLM's datasets."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from deepinfer.bench.serve_workload import Request, count_tokens, random_text, read_lines, take

DEFAULT_OUTPUT_LEN = 256
SONNET_QUESTION = "Pick as many lines as you can from these poem lines:\n"


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


def spec_bench_requests(
    path: Path, num_prompts: int | None, output_len: int, category: str | None, draw: np.random.Generator
) -> list[Request]:
    """Spec-Bench's questions: the first of the `turns` of each line, of one `category` or all, in random order.

    Raises ValueError naming a bad line, and the categories that there are if `category` is none of them.
    """
    questions = []
    for number, entry in read_lines(path):
        turns = entry.get("turns")
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
            raise ValueError(f"--dataset-path {path}, line {number}: needs turns, a list of questions")
        questions.append((str(entry.get("category", "")), turns[0]))
    known = sorted({name for name, _ in questions})
    if category is not None and questions and category not in known:
        raise ValueError(f"--spec-bench-category must be one of {', '.join(known)}, got {category!r}")
    chosen = [question for name, question in questions if category in (None, name)]
    order = draw.permutation(len(chosen))
    return take([Request(chosen[number], output_len) for number in order], num_prompts, path)


def sonnet_requests(
    path: Path,
    num_prompts: int,
    prefix_len: int,
    input_len: int,
    output_len: int,
    tokenizer: tokenizers.Tokenizer | None,
    draw: np.random.Generator,
) -> list[Request]:
    """Prompts of lines of a text: its first ones in every prompt, up to `prefix_len` tokens, then random ones.

    A line more would make a prompt longer than `input_len`.  Raises ValueError if nothing fits.
    """
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.strip()]
    if not lines:
        raise ValueError(f"--dataset-path {path}: holds no lines")
    sizes = [count_tokens(line, tokenizer) for line in lines]
    room = input_len - count_tokens(SONNET_QUESTION, tokenizer)
    shared = prefix_len - count_tokens(SONNET_QUESTION, tokenizer)
    if not min(shared, room) >= 0 or prefix_len > input_len or min(sizes) > room - max(0, shared):
        message = f"--sonnet-prefix-len {prefix_len} and --sonnet-input-len {input_len}"
        raise ValueError(f"{message} leave no room for the question, the prefix and a line of {path}")
    used, prefix = 0, ""
    for line, size in zip(lines, sizes, strict=True):
        if used + size > shared:
            break
        used, prefix = used + size, prefix + line
    requests = []
    for _ in range(num_prompts):
        text, left = SONNET_QUESTION + prefix, room - used
        while True:
            number = int(draw.integers(len(lines)))
            if sizes[number] > left:
                break
            text, left = text + lines[number], left - sizes[number]
        requests.append(Request(text, output_len))
    return requests


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
