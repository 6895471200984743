"""What `deepinfer bench serve` sends, and when: prompts (made up or from a file) and arrival times.

Made-up prompts are strings of random words. With a tokenizer each word is exactly one token; without one the words are
short English ones, a token each in most vocabularies. Either way the report counts what the server counted.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

CHARACTERS_PER_TOKEN = 4  # the estimate for texts of a file when there is no tokenizer
_PLAIN_WORDS = """
able about above after again against all almost along also always among and another answer any around ask away back
base because become been before began being below best better between big both bring build but call came can car carry
city clear close cold come could country course cover cut dark day deep did does done door down draw each early earth
east eat end enough even ever every face fall family far farm fast father feet few field figure find fire first fish
five follow food form found four friend from front full gave get girl give good great green ground group grow had half
hand hard has have head hear help here high hold home horse hot hour house hundred idea into island just keep kind king
knew know land large last late lead learn leave left letter life light like line list little live long look made main
make man many map mark may mean measure men might mile mind money moon more morning most mother mountain move much music
must name near need never new next night north note notice now number off often old once one only open order other our
""".split()


@dataclass(frozen=True)
class Request:
    """`prompt` is text, or token IDs (/v1/completions only); `arrival` is in seconds and only known to traces."""

    prompt: str | list[int]
    output_len: int
    arrival: float | None = None


def load_tokenizer(name: str) -> tokenizers.Tokenizer:
    """A tokenizer.json, a folder that holds one, or `nano`.  Raises ValueError naming the option."""
    path = Path(__file__).parent.parent / "checkpoints" / name if name == "nano" else Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"--tokenizer must be a tokenizer.json, a folder that holds one, or nano, got {name!r}")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(f"--tokenizer: cannot read {path}: {error}") from None


def word_pool(tokenizer: tokenizers.Tokenizer | None) -> list[str]:
    """Words with a leading space; with a tokenizer, those that are one token.  Raises ValueError for fewer than 16."""
    if tokenizer is None:
        return [" " + word for word in _PLAIN_WORDS]
    spelled = {token_id: token.replace("Ġ", " ").replace("▁", " ") for token, token_id in tokenizer.get_vocab().items()}
    words = {token_id: text for token_id, text in spelled.items() if re.fullmatch(" [A-Za-z]+", text)}
    encoded = tokenizer.encode_batch(list(words.values()), add_special_tokens=False)
    pool = [words[token_id] for token_id, found in zip(words, encoded, strict=True) if found.ids == [token_id]]
    if len(pool) < 16:
        raise ValueError(f"--tokenizer: only {len(pool)} of its tokens are whole words; leave the option out")
    return sorted(pool)


def count_tokens(text: str, tokenizer: tokenizers.Tokenizer | None) -> int:
    """At least 1; an estimate without a tokenizer."""
    if tokenizer is None:
        return max(1, len(text) // CHARACTERS_PER_TOKEN)
    return max(1, len(tokenizer.encode(text, add_special_tokens=False).ids))


def random_text(words: Sequence[str], length: int, draw: np.random.Generator) -> str:
    return "".join(words[number] for number in draw.integers(len(words), size=length))


def random_requests(
    words: Sequence[str],
    num_prompts: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    draw: np.random.Generator,
) -> list[Request]:
    """Lengths are uniform in [length x (1 - range_ratio), length x (1 + range_ratio)], as in vLLM."""
    if not 0 <= range_ratio < 1:
        raise ValueError(f"--random-range-ratio must be in [0, 1), got {range_ratio}")

    def lengths(mean: int) -> list[int]:
        low, high = math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))
        return draw.integers(max(1, low), high + 1, size=num_prompts).tolist()

    sizes = zip(lengths(input_len), lengths(output_len), strict=True)
    return [Request(random_text(words, prompt_len, draw), answer_len) for prompt_len, answer_len in sizes]


def as_token_ids(requests: Sequence[Request], words: Sequence[str], tokenizer: tokenizers.Tokenizer) -> list[Request]:
    """Made-up requests with the token IDs of their words in place of text: nothing is left for the server to encode."""
    encoded = tokenizer.encode_batch(list(words), add_special_tokens=False)
    ids = {word.strip(): found.ids[0] for word, found in zip(words, encoded, strict=True)}
    return [Request([ids[word] for word in str(one.prompt).split()], one.output_len) for one in requests]


def shared_prefix_requests(
    words: Sequence[str],
    num_prompts: int,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    draw: np.random.Generator,
) -> list[Request]:
    """Every prompt is one of `num_prefixes` prefixes, equally often and in random order, and a suffix of its own."""
    prefixes = [random_text(words, prefix_len, draw) for _ in range(num_prefixes)]
    order = draw.permutation(np.arange(num_prompts) % num_prefixes)
    return [Request(prefixes[number] + random_text(words, suffix_len, draw), output_len) for number in order]


def sharegpt_requests(
    path: Path,
    num_prompts: int | None,
    output_len: int | None,
    tokenizer: tokenizers.Tokenizer | None,
    draw: np.random.Generator,
) -> list[Request]:
    """First question of each conversation, as many tokens as its answer had (or `output_len`), in random order.

    The file is a JSON list of {"conversations": [{"from", "value"}, ...]}.  Conversations of fewer than two turns are
    left out; the rest is repeated when it is shorter than `num_prompts`.  Raises ValueError for another shape.
    """
    try:
        entries = json.loads(path.read_text())
        turns = [entry.get("conversations", entry.get("conversation", [])) for entry in entries]
        pairs = [(str(turn[0]["value"]), str(turn[1]["value"])) for turn in turns if len(turn) >= 2]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"--dataset-path {path}: not a ShareGPT file ({error!r})") from None
    pairs = [pairs[number] for number in draw.permutation(len(pairs)) if all(pairs[number])]
    chosen = take(pairs, num_prompts, path)
    return [Request(prompt, output_len or count_tokens(answer, tokenizer)) for prompt, answer in chosen]


def trace_requests(
    path: Path,
    num_prompts: int | None,
    words: Sequence[str],
    seconds_per_tick: float,
    hash_block: int,
    draw: np.random.Generator,
) -> list[Request]:
    """One JSON object a line: when, what, how many tokens of answer.

    `timestamp` is optional, in ticks, and shifted so that the first request arrives at 0.  What: `prompt` (text),
    `prompt_token_ids`, or `input_length` for random words; with Mooncake's `hash_ids` each ID stands for a block of
    `hash_block` words, the same in every prompt, so that prefixes are shared as they were.  How many: `output_length`.
    """
    entries = take(list(read_lines(path)), None, path)
    entries.sort(key=lambda entry: entry[1].get("timestamp", 0))
    first = entries[0][1].get("timestamp", 0)
    salt = int(draw.integers(1 << 31))
    requests = []
    for number, entry in entries[:num_prompts]:
        try:
            arrival = (entry["timestamp"] - first) * seconds_per_tick if "timestamp" in entry else None
            prompt = entry.get("prompt") or entry.get("prompt_token_ids")
            if prompt is None:
                blocks = entry.get("hash_ids", [])
                prompt = _hashed_text(words, int(entry["input_length"]), blocks, hash_block, salt, draw)
            requests.append(Request(prompt, max(1, int(entry["output_length"])), arrival))
        except KeyError as error:
            raise ValueError(f"--dataset-path {path}, line {number}: {error} is missing") from None
    return requests


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not empty."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"--dataset-path {path}, line {number}: not JSON ({error})") from None
        numbers = ("timestamp", "input_length", "output_length")
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key, 0), int | float) for key in numbers):
            raise ValueError(f"--dataset-path {path}, line {number}: must be an object with numbers as {numbers}")
        yield number, entry


def _hashed_text(
    words: Sequence[str], length: int, hash_ids: list[int], block: int, salt: int, draw: np.random.Generator
) -> str:
    blocks = [random_text(words, block, np.random.default_rng([salt, hash_id])) for hash_id in hash_ids]
    shared = "".join(blocks).split()[:length]
    return "".join(" " + word for word in shared) + random_text(words, max(0, length - len(shared)), draw)


def take(entries: list[Any], count: int | None, path: Path) -> list[Any]:
    """`count` entries, from the start again when there are fewer; all of them for None."""
    if not entries:
        raise ValueError(f"--dataset-path {path}: holds no requests")
    return entries if count is None else list(itertools.islice(itertools.cycle(entries), count))


def ramp(count: int, start: float, end: float, strategy: str) -> np.ndarray:
    """Rates of the `count - 1` gaps, from `start` to `end` requests a second, as vLLM's ramp-up has them."""
    progress = np.arange(count - 1) / max(1, count - 1)
    return start * (end / start) ** progress if strategy == "exponential" else start + (end - start) * progress


def arrival_times(count: int, rate: float | np.ndarray, burstiness: float, draw: np.random.Generator) -> list[float]:
    """Seconds after the start; the first is 0.  `rate` is in requests a second, one or each gap's own (see `ramp`).

    Gaps are gamma-distributed with mean 1 / `rate` and shape `burstiness`, as in vLLM: 1 is a Poisson process, less is
    burstier, more is steadier, infinity is a constant rate.  An infinite `rate` sends all at once.
    """
    if not np.all(np.greater(rate, 0)) or not burstiness > 0:
        raise ValueError(f"--request-rate and --burstiness must be above 0, got {rate} and {burstiness}")
    if np.any(np.isinf(rate)):
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.broadcast_to(1 / rate, count - 1)
    else:
        gaps = draw.gamma(burstiness, 1 / (rate * burstiness), size=count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def warm_up_requests(requests: Sequence[Request], count: int) -> list[Request]:
    """Requests of the same lengths with another start, so that warming up fills no prefix that is then measured."""
    return [
        Request(_halves_swapped(one.prompt), one.output_len)
        for one in itertools.islice(itertools.cycle(requests), count)
    ]


def _halves_swapped(prompt: str | list[int]) -> str | list[int]:
    middle = len(prompt) // 2
    if isinstance(prompt, str):
        return prompt[middle:] + prompt[:middle]
    return prompt[middle:] + prompt[:middle]
