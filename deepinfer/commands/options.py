"""Options that several commands share, and how they become SamplingParams and EngineConfig."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.commands.units import parse_bytes, parse_count
from deepinfer.terminal import waiting

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


Model = Annotated[str, typer.Option("--model", "-m", "--model-path", help="`nano` or a checkpoint folder.")]

MaxTokens = Annotated[int | None, _sampling("Most tokens to generate; default: to the end of the context.")]
Temperature = Annotated[float | None, _sampling("0 is greedy; default: 1, or the model's own.", "--temperature", "-t")]
TopP = Annotated[float | None, _sampling("Keep the most likely tokens up to this mass, in (0, 1].")]
TopK = Annotated[int | None, _sampling("Keep this many most likely tokens; 0 keeps all.")]
MinP = Annotated[float | None, _sampling("Drop tokens below this share of the most likely one.")]
PresencePenalty = Annotated[float, _sampling("Subtracted from every token already generated, -2 to 2.")]
FrequencyPenalty = Annotated[float, _sampling("Subtracted once per occurrence, -2 to 2.")]
RepetitionPenalty = Annotated[float | None, _sampling("Above 1 makes tokens already seen less likely.")]
Seed = Annotated[int | None, _sampling("Same seed, same answer.")]
Stop = Annotated[list[str] | None, _sampling("End at this string; may be repeated.")]
StopTokenId = Annotated[list[int] | None, _sampling("End after this token ID; may be repeated.", "--stop-token-id")]
IgnoreEos = Annotated[bool, _sampling("Go on after the end-of-sequence token.")]
MinTokens = Annotated[int, _sampling("No end before this many tokens.")]
Logprobs = Annotated[int | None, _sampling("Print log-probabilities, also of this many most likely tokens (0 to 20).")]
LogitBias = Annotated[list[str] | None, _sampling("TOKEN_ID:VALUE added to a logit, e.g. 42:-100; may be repeated.")]
ForceTopk = Annotated[int | None, _sampling("Restrict the softmax to this many largest logits.")]
GoldenTokenIds = Annotated[str | None, _sampling("Token IDs with commas, to take as the answer (teacher forcing).")]
N = Annotated[int, _sampling("Number of answers.", "-n", "--n")]
JsonSchema = Annotated[
    str | None, _sampling("The answer is JSON of this JSON Schema, or of the one in @FILE.", "--json-schema")
]
Regex = Annotated[str | None, _sampling("The answer matches this regular expression.", "--regex")]
Grammar = Annotated[
    str | None, _sampling("The answer matches this EBNF grammar (root ::= ...), or the one in @FILE.", "--grammar")
]

# The second spelling of an option is SGLang's.
MaxNumSeqs = Annotated[
    str | None, _engine("Most sequences at the same time; default: 64.", "--max-num-seqs", "--max-running-requests")
]
MaxModelLen = Annotated[
    str | None, _engine("Most tokens of a sequence, e.g. 25.6k or 32K.", "--max-model-len", "--context-length")
]
MaxNumBatchedTokens = Annotated[
    str | None, _engine("Most tokens of one prefill step.", "--max-num-batched-tokens", "--max-prefill-tokens")
]
PrefillChunkSize = Annotated[
    str | None,
    _engine("Most tokens of one sequence in one prefill step.", "--prefill-chunk-size", "--chunked-prefill-size"),
]
KvCacheDtype = Annotated[str | None, _engine("auto, fp32, bf16, fp8 or fp64.")]
Dtype = Annotated[str | None, _engine("Arithmetic: auto, fp32, bf16 or fp64.")]
Device = Annotated[str | None, _engine("auto, cpu, cuda or cuda:N; default: auto, a GPU if there is one.")]
NumBlocks = Annotated[
    int | None,
    _engine(
        "Cache blocks of 128 tokens; default: what --cache-memory holds.", "--num-blocks", "--num-gpu-blocks-override"
    ),
]
CacheMemory = Annotated[
    str | None,
    _engine(
        "Memory for the KV cache, e.g. 40GiB, or less if that is enough; default: 2GiB, on a GPU what "
        "--gpu-memory-utilization leaves."
    ),
]
GpuMemoryUtilization = Annotated[
    float | None,
    _engine(
        "Share of a GPU's memory for weights and caches; default: 0.9.",
        "--gpu-memory-utilization",
        "--mem-fraction-static",
    ),
]
PreemptionMode = Annotated[
    str | None, _engine("When the cache is full: recompute a sequence later, or swap it to host memory.")
]
SwapMemory = Annotated[str | None, _engine("Host memory for --preemption-mode swap, e.g. 4GiB.")]
PrefillStepMs = Annotated[float | None, _engine("Most milliseconds of one prefill step, by measured cost.")]

Speculative = Annotated[
    str | None,
    _engine(
        'Speculative decoding, as JSON: {"method": "ngram"} or "dspark", "num_speculative_tokens", ... '
        "(docs/speculation.md); or key by key: --speculative-config.method ngram.",
        "--speculative-config",
    ),
]
_SGLANG_ONLY = "SGLang's spelling of a key of --speculative-config"
SpeculativeAlgorithm = Annotated[str | None, typer.Option(hidden=True, help=f"{_SGLANG_ONLY}: DSPARK or NGRAM.")]
SpeculativeNumDraftTokens = Annotated[
    int | None, typer.Option(hidden=True, help=f"{_SGLANG_ONLY}: the rows that are verified, drafts and one.")
]
SpeculativeBlockSize = Annotated[
    int | None, typer.Option("--speculative-dspark-block-size", hidden=True, help=f"{_SGLANG_ONLY}: drafts a round.")
]

Group = dict[str, tuple[Any, Any]]  # option -> (type, default)

# What `generate` and `chat` have in common, and what both and `serve` have.
SAMPLING: Group = {
    "max_tokens": (MaxTokens, None),
    "temperature": (Temperature, None),
    "top_p": (TopP, None),
    "top_k": (TopK, None),
    "min_p": (MinP, None),
    "presence_penalty": (PresencePenalty, 0.0),
    "frequency_penalty": (FrequencyPenalty, 0.0),
    "repetition_penalty": (RepetitionPenalty, None),
    "seed": (Seed, None),
    "stop_token_ids": (StopTokenId, None),
    "ignore_eos": (IgnoreEos, False),
    "min_tokens": (MinTokens, 0),
    "logit_bias": (LogitBias, None),
    "force_topk": (ForceTopk, None),
}
ENGINE: Group = {
    "max_model_len": (MaxModelLen, None),
    "kv_cache_dtype": (KvCacheDtype, None),
    "dtype": (Dtype, None),
    "device": (Device, None),
    "cache_memory": (CacheMemory, None),
    "gpu_memory_utilization": (GpuMemoryUtilization, None),
    "speculative_config": (Speculative, None),
}


def takes(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose parameter of each group's name is a dict of that group's values; users see single options."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [one for name, one in inspect.signature(command, eval_str=True).parameters.items() if name not in groups]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for group in groups.values()
            for name, (kind, default) in group.items()
        ]

        @functools.wraps(command)
        def run(*args: Any, **given: Any) -> None:
            for group, names in groups.items():
                given[group] = {name: given.pop(name) for name in names}
            command(*args, **given)

        run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in (*own, *added)}
        return run

    return decorate


def make_sampling_params(
    *,
    logit_bias: list[str] | None = None,
    golden_token_ids: str | None = None,
    json_schema: str | None = None,
    regex: str | None = None,
    grammar: str | None = None,
    **given: Any,
) -> SamplingParams:
    """SamplingParams from command-line values; None means the default.  Raises ValueError naming the field."""
    from deepinfer.params import SamplingParams

    values = {name: value for name, value in given.items() if value is not None}
    if logit_bias:
        values["logit_bias"] = dict(_bias(entry) for entry in logit_bias)
    if golden_token_ids is not None:
        values["golden_token_ids"] = parse_numbers(golden_token_ids, "--golden-token-ids")
    schemas = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    asked = [name for name, schema in schemas.items() if schema is not None]
    if len(asked) > 1:
        raise ValueError(f"{as_option(asked[0])} and {as_option(asked[1])} cannot both say what the answer must be")
    for name in asked:
        schema = _text_or_file(schemas[name] or "", name != "regex", as_option(name))
        values["so_args"] = {"schema_type": _SCHEMA_TYPES[name], "schema": schema}
    with naming_options(schemas):
        return SamplingParams(**values)


_SCHEMA_TYPES = {"json_schema": "json", "regex": "regex", "grammar": "ebnf"}


def as_option(name: str) -> str:
    return "--" + name.replace("_", "-")


@contextmanager
def naming_options(given: Mapping[str, Any]) -> Iterator[None]:
    """Faults of structured output in the words of the option that asks for it."""
    try:
        yield
    except ValueError as error:
        if "so_args" not in str(error):
            raise
        option = next((as_option(name) for name in _SCHEMA_TYPES if given.get(name) is not None), "so_args")
        raise ValueError(str(error).replace("so_args.schema", option, 1).replace("so_args", option)) from None


def _text_or_file(text: str, may_be_file: bool, option: str) -> str:
    """The text itself, or with @ in front the file that it names."""
    if not (may_be_file and text.startswith("@")):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option}: {text[1:]} cannot be read: {error}") from None


def _bias(entry: str) -> tuple[int, float]:
    token, _, value = entry.partition(":")
    try:
        return int(token), float(value)
    except ValueError:
        raise ValueError(f"--logit-bias must be TOKEN_ID:VALUE such as 42:-100, got {entry!r}") from None


def with_defaults(sampling: dict[str, Any], model: str) -> dict[str, Any]:
    """The values given, and where none is, those that the model's generation_config.json recommends."""
    from deepinfer.config.generation import generation_defaults
    from deepinfer.engine.loading import resolve_model

    recommended = generation_defaults(resolve_model(model))
    return sampling | {name: value for name, value in recommended.items() if sampling[name] is None}


@contextmanager
def running_engine(model: str, config: EngineConfig) -> Iterator[TextEngine]:
    """The engine of a command that generates, stopped at the end of it."""
    with waiting(f"loading {Path(model).name}"):
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


def sglang_speculation(
    speculative_config: str | None, algorithm: str | None, num_draft_tokens: int | None, block_size: int | None
) -> str | None:
    """The --speculative-config that SGLang's options mean, where they are given.  Raises ValueError naming the option.

    There, --speculative-num-draft-tokens counts the row of the latest token as well.
    """
    if algorithm is None:
        if num_draft_tokens is not None or block_size is not None:
            raise ValueError("--speculative-algorithm must be given with the options of it: DSPARK or NGRAM")
        return speculative_config
    if speculative_config is not None:
        raise ValueError("--speculative-algorithm and --speculative-config cannot both be given")
    if algorithm.upper() not in ("DSPARK", "NGRAM"):
        raise ValueError(f"--speculative-algorithm must be DSPARK or NGRAM, got {algorithm!r}")
    if block_size is not None and algorithm.upper() != "DSPARK":
        raise ValueError("--speculative-dspark-block-size is of --speculative-algorithm DSPARK alone")
    config: dict[str, Any] = {"method": algorithm.lower()}
    if num_draft_tokens is not None and num_draft_tokens < 2:
        raise ValueError(f"--speculative-num-draft-tokens must be at least 2, got {num_draft_tokens}")
    counts = {count for count in (block_size, num_draft_tokens and num_draft_tokens - 1) if count is not None}
    if len(counts) > 1:
        raise ValueError(
            f"--speculative-num-draft-tokens must be --speculative-dspark-block-size + 1, got {num_draft_tokens} "
            f"and {block_size}"
        )
    if counts:
        config["num_speculative_tokens"] = counts.pop()
    return json.dumps(config)


def make_engine_config(
    *,
    max_num_seqs: str | None = None,
    max_model_len: str | None = None,
    max_num_batched_tokens: str | None = None,
    prefill_chunk_size: str | None = None,
    cache_memory: str | None = None,
    swap_memory: str | None = None,
    speculative_config: str | None = None,
    **given: Any,
) -> EngineConfig:
    """EngineConfig from command-line values; None means the default.  Raises ValueError naming the field."""
    from deepinfer.config.engine import EngineConfig

    values = {"device": "auto"} | {name: value for name, value in given.items() if value is not None}
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
    if swap_memory is not None:
        values["swap_memory_bytes"] = parse_bytes(swap_memory, "--swap-memory")
    if speculative_config is not None:
        try:
            values["speculative_config"] = json.loads(speculative_config)
        except ValueError:
            raise ValueError(f"--speculative-config must be JSON, got {speculative_config!r}") from None
    return EngineConfig(**values)
