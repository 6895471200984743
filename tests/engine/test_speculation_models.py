"""Speculation over the real model: prompt lookup and the draft head give the tokens of decoding one by one."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.engine import runner as runner_module
from deepinfer.engine.decode_curve import DecodeCurve
from deepinfer.engine.engine import Engine
from deepinfer.engine.runner import ModelRunner
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.random_weights import random_weights
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.configs import tiny_config, tiny_token_map
from tests.engine.test_engine_workloads import assert_idle, record

CONFIG = tiny_config(2, max_position_embeddings=4096)
TOKEN_MAP = torch.from_numpy(tiny_token_map()).long()
BLOCK = CONFIG.dspark_block_size


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that those that have any chance are verified, on whatever machine this runs."""
    monkeypatch.setattr(ModelRunner, "decode_curve", lambda self: DecodeCurve(((1, 1e6),)))


@cache
def model(draft_head: bool) -> DeepseekV41:
    """In float64: how many rows a step has cannot tip a token. The head of a model of random weights says anything."""
    weights = {name: w.double() for name, w in random_weights(CONFIG, seed=0).items()}
    return DeepseekV41(CONFIG, weights, TOKEN_MAP, draft_head=draft_head)


def make_engine(speculative: dict | None, **options: object) -> Engine:
    has_head = speculative is not None and speculative["method"] == "dspark"
    defaults = {
        "block_size": 8, "num_blocks": 40, "max_num_seqs": 5, "max_num_batched_tokens": 64, "prefill_chunk_size": 24,
        "kv_cache_dtype": "fp64", "dtype": "fp64", "seed": 1, "speculative_config": speculative,
    }  # fmt: skip
    config = EngineConfig(**{**defaults, **options})
    return Engine(ModelRunner(model(has_head), config), config, [CONFIG.eos_token_id])


def requests(seed: int) -> list[tuple[int, list[int], SamplingParams]]:
    """Step of arrival, prompt and parameters of six requests: repetitive prompts, greedy and drawn."""
    rng, made = random.Random(seed), []
    for number in range(6):
        phrase = [rng.randrange(3, 500) for _ in range(rng.randint(1, 12))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.3, 1.0]), seed=number, max_tokens=rng.randint(5, 30),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]), logprobs=rng.choice([None, 2]), n=rng.choice([1, 1, 2]),
            ignore_eos=True, allowed_token_ids=rng.choice([None, (7, 8, 9), (5, 6)]),  # few tokens repeat themselves
        )  # fmt: skip
        made.append((rng.randrange(15), (phrase * 9)[: rng.randint(1, 80)], params))
    return made


def arrivals_of(seed: int) -> dict[str, SamplingParams]:
    return {str(number): params for number, (_, _, params) in enumerate(requests(seed))}


def run(engine: Engine, seed: int) -> dict[str, RequestOutput]:
    """The requests at their steps: more than the cache holds at once."""
    got: dict[str, RequestOutput] = {}
    arrivals: dict[int, list[tuple]] = {}
    for number, (step, prompt, params) in enumerate(requests(seed)):
        arrivals.setdefault(step, []).append((str(number), prompt, params))
    for step in range(5000):
        for arrival in arrivals.pop(step, []):
            engine.add_request(*arrival)
        record(got, engine.step())
        engine.scheduler.check_integrity()
        if not arrivals and not engine.has_unfinished_requests():
            break
    assert_idle(engine)
    return got


def assert_same(got: dict[str, RequestOutput], want: dict[str, RequestOutput]) -> None:
    assert got.keys() == want.keys()
    for request_id in want:
        mine, theirs = (sorted(outputs[request_id].outputs, key=lambda c: c.index) for outputs in (got, want))
        for a, b in zip(mine, theirs, strict=True):
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
            for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
                assert x.token_id == y.token_id and x.logprob == pytest.approx(y.logprob, abs=1e-5)
                assert [token for token, _ in x.top] == [token for token, _ in y.top]


@cache
def without_drafts() -> dict[str, RequestOutput]:
    return run(make_engine(None), 0)


METHODS = [
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    {"method": "ngram", "num_speculative_tokens": 3, "variable_length": False},
    {"method": "dspark"},
    {"method": "dspark", "variable_length": False, "num_speculative_tokens": BLOCK - 1},
]


@pytest.mark.parametrize("speculative", METHODS, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize(("overlap", "graphs", "mode"), [(0, 0, "recompute"), (1, 0, "swap"), (1, 1, "recompute")])
def test_outputs_are_those_without_drafts(speculative: dict, overlap: int, graphs: int, mode: str) -> None:
    engine = make_engine(
        speculative,
        zero_overhead_scheduling=bool(overlap),
        cuda_graphs=bool(graphs),
        preemption_mode=mode,
        num_blocks=16,
    )
    got, want = run(engine, 0), without_drafts()
    assert engine.scheduler.num_preemptions > 0
    assert_same(got, want)
    totals = engine.observer.stats.totals
    assert totals["draft_tokens"] > 0
    if speculative["method"] == "ngram":
        assert totals["accepted"] > 0
    by_position = [totals[f"accepted_at_{position}"] for position in range(engine.speculation.drafter.num_drafts)]
    assert sum(by_position) == totals["accepted"]
    assert by_position == sorted(by_position, reverse=True) and by_position[0] <= totals["drafts"]


def test_drafts_that_are_drawn_leave_greedy_answers_as_they_are() -> None:
    """And the others end as they should; what they say is another draw (test_speculation_drawn.py)."""
    engine = make_engine({"method": "dspark", "draft_sample_method": "probabilistic"}, num_blocks=16)
    got, want = run(engine, 0), without_drafts()
    assert engine.observer.stats.totals["draft_tokens"] > 0
    for request_id, output in want.items():
        for mine, theirs in zip(got[request_id].outputs, output.outputs, strict=True):
            assert len(mine.token_ids) == len(theirs.token_ids) and mine.finish_reason == theirs.finish_reason
    greedy = [request_id for request_id, params in arrivals_of(0).items() if params.temperature == 0]
    assert greedy
    assert_same({key: got[key] for key in greedy}, {key: want[key] for key in greedy})


def test_the_probabilities_of_drafts_that_are_drawn_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    monkeypatch.setattr(runner_module, "check_caches_fit", lambda *sizes: planned.append(sizes[-1]))
    engines = [
        make_engine({"method": "dspark", "draft_sample_method": method}) for method in ("greedy", "probabilistic")
    ]
    greedy, drawn = (engine.speculation.drafter.probabilities for engine in engines)
    num_slots = engines[1].config.max_num_seqs + 1
    assert greedy is None and (planned[1] - planned[0]) * num_slots == drawn.nbytes > 0


def test_packed_caches_and_truncated_prefill() -> None:
    options = {"kv_cache_dtype": "fp8", "yoco_prefill_truncation_mode": "compact", "yoco_prefill_keep_tokens": 30}
    want = run(make_engine(None, **options), 0)
    for speculative in METHODS[::2]:
        assert_same(run(make_engine(speculative, **options), 0), want)


def test_what_cannot_be_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens must be at most 3, what the draft head makes, got 5"):
        make_engine({"method": "dspark", "num_speculative_tokens": 5})
    config = EngineConfig(speculative_config={"method": "dspark"}, block_size=8, num_blocks=40)
    with pytest.raises(ValueError, match="the checkpoint has no draft head"):
        ModelRunner(model(False), config)
    with pytest.raises(ValueError, match=r"max_backtracking_tokens must be at least 6 .*got 4"):
        make_engine({"method": "ngram"}, max_backtracking_tokens=4)
    with pytest.raises(ValueError, match="torch_compile must be false"):
        make_engine({"method": "dspark"}, torch_compile=True)
    with pytest.raises(ValueError, match="yoco_prefill_keep_tokens must be at least 22"):
        make_engine({"method": "ngram"}, yoco_prefill_truncation_mode="compact", yoco_prefill_keep_tokens=21)
