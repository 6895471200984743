"""200 random workloads with everything on, over the toy model: its tokens show every wrong block, slot and position."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from deepinfer.engine.engine import Engine
from tests.engine.random_workloads import CURVE, NUM_WORKLOADS, SAMPLE, Watched, random_workload, simulate_time
from tests.engine.test_speculation import BLOCK_SIZE, Setting, make_engine, run, texts_of
from tests.engine.toy_grammar import compiler
from tests.engine.toy_model import VOCAB_SIZE

GRAMMARS: list[dict[str, Any]] = [
    {"schema_type": "regex", "schema": "(ab|cd){2,9}[a-e]{3}"},
    {"schema_type": "regex", "schema": "[A-Z]{6,20}"},
    {"schema_type": "choice", "schema": ["leftleftleft", "rightright", "lefty"]},
    {"schema_type": "ebnf", "schema": 'root ::= item ("x" item){1,5}\nitem ::= "yes" | "no" | [a-c]+'},
]


def prompt(rng: random.Random) -> list[int]:
    return rng.choices(range(VOCAB_SIZE), k=rng.randint(5, 40))


def with_grammars(engine: Engine) -> Engine:
    engine.grammars = compiler()
    return engine


def check_workloads(numbers: Sequence[int]) -> None:
    """In each of them everything happens. In a few, no draft is rejected or none accepted."""
    seen: Counter[str] = Counter()
    drafting = 0
    for number in numbers:
        workload = random_workload(number, prompt, GRAMMARS)
        roomy = Setting(0, False, False, False, 400, 16, 16, 0.0, 0)
        want = run(with_grammars(make_engine(roomy, None)), workload.arrivals)
        rng = random.Random(-number)
        swaps = number % 4 < 2
        longest = max(len(arrival.prompt) + (arrival.params.max_tokens or 0) for arrival in workload.arrivals)
        setting = Setting(
            num_drafts=rng.randint(2, 5), overlap=True, padded=True, swap=swaps,
            num_blocks=2 + -(-longest // BLOCK_SIZE),
            max_num_seqs=rng.randint(4, 6), chunk=rng.choice([1, 5, 16]), honesty=rng.choice([0.6, 0.8, 0.95]),
            seed=number,
        )  # fmt: skip
        engine = with_grammars(make_engine(setting, texts_of(workload.arrivals, want), CURVE))
        simulate_time(engine)
        watched = Watched(engine)
        what = watched.check(f"workload {number}", workload, want, tolerance=0.0)
        assert what["preempted"] and what["abort"] and what["tokens under a grammar"], f"workload {number}: {what}"
        assert not swaps or what["swapped"], f"workload {number}: {what}"
        drafting += what["accepted"] > 0 and what["verified"] > what["accepted"] and len(watched.lengths) > 1
        seen += what
    assert seen["stop"] and seen["length"] and drafting > 0.6 * len(numbers)


@pytest.mark.parametrize("part", range(2))
def test_tokens_of_a_sample_are_those_of_decoding_one_by_one(part: int) -> None:
    check_workloads(SAMPLE[part::2])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_tokens_are_those_of_decoding_one_by_one(part: int) -> None:
    check_workloads(range(part, NUM_WORKLOADS, 4))
