"""Options that several commands share, and how they become SamplingParams and EngineConfig."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.commands.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from deepinfer.config.engine import EngineConfig
    from deepinfer.params import SamplingParams
    from deepinfer.server.text_engine import TextEngine

_SAMPLING = "Sampling"
_ENGINE = "Engine"


def examples(*lines: str) -> str:
    """The end of a command's --help."""
    return "\n\n".join(["[bold]Examples[/]", *(line.replace("[", "\\[") for line in lines)])


def _sampling(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_SAMPLING)


def _engine(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_ENGINE)


Model = Annotated[str, typer.Option("--model", "-m", help="`nano` or a checkpoint folder.")]

MaxTokens = Annotated[int | None, _sampling("Most tokens to generate; default: to the end of the context.")]
Temperature = Annotated[float, _sampling("0 is greedy.", "--temperature", "-t")]
TopP = Annotated[float, _sampling("Keep the most likely tokens up to this mass, in (0, 1].")]
TopK = Annotated[int, _sampling("Keep this many most likely tokens; 0 keeps all.")]
MinP = Annotated[float, _sampling("Drop tokens below this share of the most likely one.")]
PresencePenalty = Annotated[float, _sampling("Subtracted from every token already generated, -2 to 2.")]
FrequencyPenalty = Annotated[float, _sampling("Subtracted once per occurrence, -2 to 2.")]
RepetitionPenalty = Annotated[float, _sampling("Above 1 makes tokens already seen less likely.")]
Seed = Annotated[int | None, _sampling("Same seed, same answer.")]
Stop = Annotated[list[str] | None, _sampling("End at this string; may be repeated.")]
StopTokenId = Annotated[list[int] | None, _sampling("End after this token ID; may be repeated.")]
IgnoreEos = Annotated[bool, _sampling("Go on after the end-of-sequence token.")]
MinTokens = Annotated[int, _sampling("No end before this many tokens.")]
Logprobs = Annotated[int | None, _sampling("Print log-probabilities, also of this many most likely tokens (0 to 20).")]
LogitBias = Annotated[list[str] | None, _sampling("TOKEN_ID:VALUE added to a logit, e.g. 42:-100; may be repeated.")]
ForceTopk = Annotated[int | None, _sampling("Restrict the softmax to this many largest logits.")]
GoldenTokenIds = Annotated[str | None, _sampling("Token IDs with commas, to take as the answer (teacher forcing).")]
N = Annotated[int, _sampling("Number of answers.", "-n", "--n")]

MaxNumSeqs = Annotated[str | None, _engine("Most sequences at the same time.")]
MaxModelLen = Annotated[str | None, _engine("Most tokens of a sequence, e.g. 25.6k or 32K.")]
MaxNumBatchedTokens = Annotated[str | None, _engine("Most tokens of one prefill step.")]
PrefillChunkSize = Annotated[str | None, _engine("Most tokens of one sequence in one prefill step.")]
KvCacheDtype = Annotated[str | None, _engine("auto, fp32, bf16, fp8 or fp64.")]
Dtype = Annotated[str | None, _engine("Arithmetic: auto, fp32, bf16 or fp64.")]
Device = Annotated[str | None, _engine("Torch device, e.g. cpu or cuda.")]
NumBlocks = Annotated[int | None, _engine("Cache blocks of 128 tokens; default: what CACHE_MEMORY holds.")]
CacheMemory = Annotated[str | None, _engine("Memory for the KV cache, e.g. 2GiB.")]


def make_sampling_params(
    *, logit_bias: list[str] | None = None, golden_token_ids: str | None = None, **given: Any
) -> SamplingParams:
    """SamplingParams from command-line values; None means the default.  Raises ValueError naming the field."""
    from deepinfer.params import SamplingParams

    values = {name: value for name, value in given.items() if value is not None}
    if logit_bias:
        values["logit_bias"] = dict(_bias(entry) for entry in logit_bias)
    if golden_token_ids is not None:
        values["golden_token_ids"] = parse_numbers(golden_token_ids, "--golden-token-ids")
    return SamplingParams(**values)


def _bias(entry: str) -> tuple[int, float]:
    token, _, value = entry.partition(":")
    try:
        return int(token), float(value)
    except ValueError:
        raise ValueError(f"--logit-bias must be TOKEN_ID:VALUE such as 42:-100, got {entry!r}") from None


@contextmanager
def running_engine(model: str, config: EngineConfig) -> Iterator[TextEngine]:
    """The engine of a command that generates, stopped at the end of it."""
    from deepinfer.server.text_engine import load_text_engine

    engine = load_text_engine(model, config)
    try:
        yield engine
    finally:
        engine.engine.close()


def parse_numbers(text: str, field: str) -> list[int]:
    """`1, 2,3` -> [1, 2, 3].  Raises ValueError naming `field`."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"{field} must be integers separated by commas, got {text!r}") from None


def make_engine_config(
    *,
    max_num_seqs: str | None = None,
    max_model_len: str | None = None,
    max_num_batched_tokens: str | None = None,
    prefill_chunk_size: str | None = None,
    cache_memory: str | None = None,
    **given: Any,
) -> EngineConfig:
    """EngineConfig from command-line values; None means the default.  Raises ValueError naming the field."""
    from deepinfer.config.engine import EngineConfig

    values = {name: value for name, value in given.items() if value is not None}
    counts = {
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "prefill_chunk_size": prefill_chunk_size,
    }
    for name, text in counts.items():
        if text is not None:
            values[name] = parse_count(text, "--" + name.replace("_", "-"))
    if cache_memory is not None:
        values["cache_memory_bytes"] = parse_bytes(cache_memory, "--cache-memory")
    return EngineConfig(**values)
