"""The random workloads with everything on, over nano and its draft head: on a CPU, and in CUDA graphs on a GPU."""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import resolve_model
from deepinfer.engine.runner import ModelRunner
from deepinfer.models.registry import Model, load_model
from deepinfer.structured.compiler import GrammarCompiler
from tests.engine.random_workloads import CURVE, NUM_WORKLOADS, Watched, random_workload, simulate_time
from tests.engine.test_speculation import run
from tests.structured.choice_backend import ChoiceBackend
from tests.structured.grammars import NANO, tokenizer, vocabulary

TEXTS = [
    "The old dog waited by the door. The rain fell, the wind blew, and the old dog waited by the door all day long. ",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return a * b\n\n",
    '[{"kind": "red", "count": 1}, {"kind": "blue", "count": 2}, {"kind": "red", "count": 3}, {"kind": "blue", ',
]
GRAMMARS: list[dict[str, Any]] = [
    {"schema_type": "regex", "schema": "(yes no ){2,6}[0-9]{3}"},
    {"schema_type": "choice", "schema": ["left left left", "right right right", "left and right and left"]},
    {"schema_type": "ebnf", "schema": 'root ::= "[" item (", " item){2,5} "]"\nitem ::= "red" | "blue" | [0-9]+'},
    {"schema_type": "json", "schema": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3, "maxItems": 6}},
]
CHOICES: list[dict[str, Any]] = [
    {"schema_type": "choice", "schema": ["left left left", "right right right", "left and right and left"]},
    {
        "schema_type": "choice",
        "schema": [f"the {a} dog and the {b} cat" for a in ("red", "old") for b in ("old", "big")],
    },
]
METHODS = {"dspark": {"method": "dspark"}, "ngram": {"method": "ngram", "prompt_lookup_min": 1}}
NUM_DRAFTS = 4


@pytest.fixture(autouse=True)
def steps_take_what_the_curve_says(monkeypatch: pytest.MonkeyPatch) -> None:
    if not list(NANO.glob("*.safetensors")):
        pytest.skip("the nano weights are not in this checkout")
    monkeypatch.setattr(ModelRunner, "decode_curve", lambda self: CURVE)
    monkeypatch.setattr("deepinfer.engine.drafters.draft_times", lambda run, state: np.zeros(len(state.lengths)))


@cache
def model(device: str) -> Model:
    return load_model(resolve_model("nano"), torch.float32, device, None, draft_head=True)


@cache
def compiler() -> Any:
    """By the library, or where it is not installed by one of our own that knows only choices."""
    if importlib.util.find_spec("llguidance") is None:
        return ChoiceBackend(vocabulary(), tokenizer().encode_text)
    return GrammarCompiler(vocabulary)


def make_engine(device: str, **options: Any) -> Engine:
    """In float32: a product of other rows differs in its last bits, which FP8 and FP4 would turn into other codes."""
    config = EngineConfig(
        device=device, dtype="fp32", kv_cache_dtype="fp32", quantize_activations=False,
        block_size=16, max_model_len=128, prefill_chunk_size=24, max_num_batched_tokens=64, **options,
    )  # fmt: skip
    runner = ModelRunner(model(device), config)
    engine = Engine(runner, config, runner.eos_token_ids)
    engine.grammars = compiler()
    return engine


def prompt(rng: random.Random) -> list[int]:
    """Some text from amid one of TEXTS, which repeat themselves."""
    token_ids = tokenizer().encode_text(rng.choice(TEXTS))
    start = rng.randrange(len(token_ids) // 2)
    return token_ids[start : start + rng.randint(4, 60)]


def check_workloads(numbers: Sequence[int], method: str, mode: str, device: str = "cpu") -> None:
    """One engine runs them all, one after the other: nothing of a workload is left for the next."""
    plain = make_engine(device, max_num_seqs=12, zero_overhead_scheduling=False, cuda_graphs=False)
    engine = make_engine(
        device, max_num_seqs=5, num_blocks=14, zero_overhead_scheduling=True, cuda_graphs=True, preemption_mode=mode,
        speculative_config={**METHODS[method], "num_speculative_tokens": NUM_DRAFTS},
    )  # fmt: skip
    simulate_time(engine)
    watched, seen = Watched(engine), Counter[str]()
    grammars = CHOICES if isinstance(engine.grammars, ChoiceBackend) else GRAMMARS
    for number in numbers:
        workload = random_workload(number, prompt, grammars)
        want = run(plain, workload.arrivals)
        what = watched.check(f"workload {number}", workload, want, tolerance=1e-3)
        assert what["preempted"] and what["abort"] and what["tokens under a grammar"], f"workload {number}: {what}"
        assert mode != "swap" or what["swapped"], f"workload {number}: {what}"
        seen += what
    assert seen["stop"] and seen["length"] and watched.lengths > {0, NUM_DRAFTS}
    assert seen["accepted"] > len(numbers) and seen["verified"] > seen["accepted"]


SETTINGS = [("dspark", "swap"), ("ngram", "recompute"), ("dspark", "recompute"), ("ngram", "swap")]


@pytest.mark.parametrize(("method", "mode"), SETTINGS[:2])
def test_tokens_of_a_few_are_those_of_decoding_one_by_one(method: str, mode: str) -> None:
    check_workloads(range(3), method, mode)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))  # a minute or two each
def test_tokens_are_those_of_decoding_one_by_one(part: int) -> None:
    check_workloads(range(part, NUM_WORKLOADS, 8), *SETTINGS[part % 4])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("part", range(3))
def test_tokens_in_cuda_graphs_are_those_of_decoding_one_by_one(part: int) -> None:
    check_workloads(range(part, NUM_WORKLOADS, 3), *SETTINGS[part], device="cuda")
