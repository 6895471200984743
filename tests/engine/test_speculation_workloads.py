"""200 random workloads with everything on: drafts, overlap, padded steps, preemption, grammars and cancelled requests.

Their tokens, log-probabilities and finish reasons are those of an engine that decodes one by one, in turn, unpadded,
with room for everybody. The model is the toy of these tests, whose tokens show every wrong block, slot and position.
"""

from __future__ import annotations

import random
import string
from collections import Counter
from functools import cache
from typing import Any

import pytest

from deepinfer.engine.engine import Engine
from deepinfer.params import SamplingParams
from deepinfer.structured.compiler import GrammarCompiler
from deepinfer.structured.vocabulary import Vocabulary
from tests.engine.test_engine_workloads import EOS
from tests.engine.test_overlap import Arrival
from tests.engine.test_speculation import Setting, make_engine, outcome, run, texts_of
from tests.engine.toy_model import VOCAB_SIZE

WORKLOADS, PARTS = 200, 8
LETTERS = (string.ascii_letters + string.digits)[:VOCAB_SIZE]  # token i is the letter i
GRAMMARS: list[dict[str, Any]] = [
    {"schema_type": "regex", "schema": "(ab|cd){2,9}[a-e]{3}"},
    {"schema_type": "regex", "schema": "[A-Z]{1,20}"},
    {"schema_type": "choice", "schema": ["leftleftleft", "rightright", "lefty"]},
    {"schema_type": "ebnf", "schema": 'root ::= item ("x" item){1,5}\nitem ::= "yes" | "no" | [a-c]+'},
]


@cache
def compiler() -> GrammarCompiler:
    token_bytes = [letter.encode() for letter in LETTERS]
    vocabulary = Vocabulary(
        token_bytes, frozenset(EOS), tuple(sorted(EOS)), VOCAB_SIZE, lambda text: [LETTERS.index(c) for c in text]
    )
    return GrammarCompiler(lambda: vocabulary)


def random_params(rng: random.Random) -> SamplingParams:
    so_args = rng.choice([None, None, *GRAMMARS])
    max_tokens = rng.randint(1, 25)
    return SamplingParams(
        max_tokens=max_tokens, temperature=rng.choice([0.0, 0.7, 1.5]), top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([0, 20]), min_p=rng.choice([0.0, 0.02]), presence_penalty=rng.choice([0.0, 1.5]),
        frequency_penalty=rng.choice([0.0, -0.5]), repetition_penalty=rng.choice([1.0, 1.3]), seed=rng.randrange(2**31),
        logprobs=rng.choice([None, 2]), n=rng.choice([1, 1, 2]), so_args=so_args,
        ignore_eos=so_args is None and rng.random() < 0.7, logit_bias=rng.choice([None, {7: 4.0}]),
    )  # fmt: skip


def random_workload(rng: random.Random) -> list[Arrival]:
    return [
        Arrival(rng.randint(0, 12), rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 40)), random_params(rng))
        for _ in range(rng.randint(3, 6))
    ]


def with_grammars(engine: Engine) -> Engine:
    engine.grammars = compiler()
    return engine


@pytest.mark.parametrize("part", range(PARTS))
def test_tokens_are_those_of_decoding_one_by_one(part: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(part, WORKLOADS, PARTS):
        rng = random.Random(number)
        workload = random_workload(rng)
        plain = Setting(0, False, False, False, 200, 16, 16, 0.0, 0)
        want = run(with_grammars(make_engine(plain, None)), workload)
        setting = Setting(
            num_drafts=rng.randint(1, 5), overlap=True, padded=True, swap=rng.random() < 0.5,
            num_blocks=rng.randint(18, 22), max_num_seqs=rng.randint(3, 6), chunk=rng.choice([1, 5, 16]),
            honesty=rng.choice([0.3, 0.8, 1.0]), seed=number,
        )  # fmt: skip
        engine = with_grammars(make_engine(setting, texts_of(workload, want)))
        assert engine.speculation is not None and engine.overlaps
        engine.speculation.variable_length = number % 4 != 0
        cancels: dict[int, list[str]] = {}
        for request in rng.sample(range(len(workload)), 2):
            cancels.setdefault(rng.randint(1, 40), []).append(str(request))
        got = run(engine, workload, cancels)
        assert got.keys() == want.keys()
        for request_id, expected in want.items():
            for mine, theirs in zip(outcome(got[request_id]), outcome(expected), strict=False):
                if mine[3] == "abort":
                    assert mine[1] == theirs[1][: len(mine[1])]
                    assert any(request_id in requests for requests in cancels.values())
                else:
                    assert mine == theirs, f"workload {number}, request {request_id}"
                seen[str(mine[3])] += 1
                seen["with grammar"] += workload[int(request_id)].params.so_args is not None
        seen["accepted"] += engine.speculation.drafter.num_accepted
        seen["preemptions"] += engine.scheduler.num_preemptions
    for what in ("abort", "stop", "length", "with grammar", "accepted", "preemptions"):
        assert seen[what] > 5, f"too few of {what}: {seen}"
