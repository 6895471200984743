"""Long runs: 20,000 requests, 5,000 with drafts and grammars, in a quarter of the cache they want; and 100,000 steps in
constant memory."""

from __future__ import annotations

import gc
import os
import random
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.outputs import RequestOutput
from deepinfer.params import SamplingParams
from tests.engine.test_engine_workloads import EOS, assert_idle, record
from tests.engine.toy_grammar import compiler, so_args
from tests.engine.toy_model import VOCAB_SIZE, ToyRunner, greedy_oracle

NUM_REQUESTS = 20_000
BLOCK_SIZE = 16
MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 1200
MOST_WAITING = 150


@dataclass
class SoakRequest:
    """`cancel_after` is the number of its tokens after which it is cancelled; 0: before it has any."""

    prompt: list[int]
    params: SamplingParams
    cancel_after: int | None = None


def draw_requests(seed: int, structured: float = 0.0) -> Iterator[SoakRequest]:
    """Without end: lengths over three orders of magnitude, 5% with tiny max_tokens.

    An eighth is to be cancelled, of which a fifth ends before that: 10% are. `structured` of them have a grammar.
    """
    rng = random.Random(seed)
    while True:
        length = min(800, int(rng.lognormvariate(4, 1.2)) + 1)
        max_tokens = rng.randint(1, 2) if rng.random() < 0.05 else min(350, int(rng.lognormvariate(3.5, 1)) + 3)
        is_sampled = rng.random() < 0.2
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.8 if is_sampled else 0.0,
            seed=rng.randrange(2**31) if is_sampled else None,
            ignore_eos=rng.random() < 0.7,
            priority=rng.choice([0, 0, 0, 0, -2, 1, 3]),
            deadline_seconds=rng.uniform(0.05, 5) if rng.random() < 0.01 else None,
        )
        if structured and rng.random() < structured:
            params = replace(params, so_args=so_args(rng.randrange(8)), ignore_eos=False)
        cancel_after = rng.randrange(max_tokens) if rng.random() < 0.125 else None
        yield SoakRequest([rng.randrange(VOCAB_SIZE) for _ in range(length)], params, cancel_after)


def make_engine(num_blocks: int, num_drafts: int = 0, **options: object) -> Engine:
    """With `num_drafts` prompt lookup drafts so many tokens, after every match of a single one."""
    if num_drafts:
        options["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_min": 1, "variable_length": False,
        }  # fmt: skip
    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, max_num_seqs=MAX_NUM_SEQS, **options)
    runner = ToyRunner(num_blocks, BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN, room=1 + num_drafts)
    engine = Engine(runner, config, EOS)
    engine.grammars = compiler()
    return engine


def solo(engine: Engine, request: SoakRequest) -> tuple[list[int], str | None]:
    """Tokens and finish reason of a request alone: of the oracle, or, if it is drawn or constrained, in an engine."""
    if request.params.temperature == 0 and request.params.so_args is None:
        return greedy_oracle(request.prompt, request.params, EOS, MAX_MODEL_LEN)[:2]
    params = SamplingParams(
        max_tokens=request.params.max_tokens, temperature=request.params.temperature, seed=request.params.seed,
        ignore_eos=request.params.ignore_eos, so_args=request.params.so_args,
    )  # fmt: skip
    engine.add_request("solo", request.prompt, params)
    tokens, reason = [], None
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens += output.outputs[0].token_ids
            reason = output.outputs[0].finish_reason
    return tokens, reason


def check(engine: Engine, request: SoakRequest, got: RequestOutput) -> None:
    tokens, reason = solo(engine, request)
    completion = got.outputs[0]
    if completion.finish_reason == "abort":
        assert request.cancel_after is not None or completion.stop_reason == "deadline"
        assert completion.token_ids == tokens[: len(completion.token_ids)]
    else:
        assert (completion.token_ids, completion.finish_reason) == (tokens, reason)


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
def test_20_000_requests_with_a_quarter_of_the_cache_they_want() -> None:
    """Overlap, swap and priorities on. DEEPINFER_SOAK_MINUTES keeps new requests coming for that long at least."""
    soak(NUM_REQUESTS)


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
def test_5_000_requests_with_drafts_of_which_a_fifth_have_grammars() -> None:
    """The same; what is compared with has no drafts."""
    totals = soak(NUM_REQUESTS // 4, structured=0.2, num_drafts=3).observer.stats.totals
    assert totals["draft_tokens"] > totals["accepted"] > 1000


def soak(num_requests: int, structured: float = 0.0, num_drafts: int = 0) -> Engine:
    """Run so many requests and compare each with itself alone."""
    minutes = float(os.environ.get("DEEPINFER_SOAK_MINUTES", 0))
    requests = draw_requests(1, structured)
    first = [next(requests) for _ in range(1000)]
    wanted = [-(-(len(r.prompt) + (r.params.max_tokens or 0)) // BLOCK_SIZE) for r in first]
    num_blocks = 1 + max(MAX_MODEL_LEN // BLOCK_SIZE, MAX_NUM_SEQS * sum(wanted) // len(wanted) // 4)
    engine = make_engine(
        num_blocks,
        num_drafts,
        zero_overhead_scheduling=True,
        preemption_mode="swap",
        swap_memory_bytes=50 * BLOCK_SIZE * 8,
    )
    alone = make_engine(1 + MAX_MODEL_LEN // BLOCK_SIZE)
    rng = random.Random(2)
    pending: dict[str, SoakRequest] = {}
    got: dict[str, RequestOutput] = {}
    counts = {"stop": 0, "length": 0, "abort": 0}
    num_added = num_cancelled = num_steps = 0
    start = time.monotonic()

    def collect(outputs: list[RequestOutput]) -> None:
        record(got, outputs)
        for output in outputs:
            if output.finished:
                finished = got.pop(output.request_id)
                check(alone, pending.pop(output.request_id), finished)
                counts[finished.outputs[0].finish_reason or ""] += 1

    while True:
        more = num_added < num_requests or time.monotonic() - start < 60 * minutes
        if not more and not engine.has_unfinished_requests():
            break
        for _ in range(rng.choice([0, 0, 1, 8, 40]) if more and len(engine.scheduler.waiting) < MOST_WAITING else 0):
            request_id = str(num_added)
            pending[request_id] = first[num_added] if num_added < len(first) else next(requests)
            engine.add_request(request_id, pending[request_id].prompt, pending[request_id].params)
            num_added += 1
        outputs = engine.step()
        num_steps += 1
        collect(outputs)
        for request_id, request in list(pending.items()) if num_steps % 8 == 0 else []:
            tokens = len(got[request_id].outputs[0].token_ids) if request_id in got else 0
            if request.cancel_after is not None and tokens >= request.cancel_after:
                output = engine.abort_request(request_id)
                assert output is not None
                num_cancelled += 1
                collect([output])
        if num_steps % 100 == 0:
            engine.scheduler.check_integrity()
    assert not pending and not got
    assert_idle(engine)
    swap = engine.scheduler.swap
    assert swap is not None and swap.blocks.num_free == swap.blocks.num_blocks - 1
    stats = engine.stats()
    print(
        f"{num_added} requests in {num_steps} steps and {time.monotonic() - start:.0f} s: {counts}, "
        f"{num_cancelled} cancelled, {stats.num_output_tokens} tokens, {stats.num_preemptions} preemptions, "
        f"{swap.num_swapped_out} of them swapped, {num_blocks} blocks"
    )
    assert num_added >= num_requests and sum(counts.values()) == num_added
    assert num_cancelled > 0.09 * num_added
    assert stats.num_preemptions > swap.num_swapped_out > 0, "both ways of preempting must have been used"
    return engine


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_100_000_steps_leave_no_allocation_behind() -> None:
    """Requests come and go, some are cancelled and many preempted, and memory is that of the first steps."""
    engine = make_engine(
        40, zero_overhead_scheduling=True, preemption_mode="swap", swap_memory_bytes=20 * BLOCK_SIZE * 8
    )
    rng = random.Random(3)
    num_added = 0

    def run(num_steps: int) -> None:
        nonlocal num_added
        for _ in range(num_steps):
            if len(engine.requests) < 8:
                params = SamplingParams(
                    temperature=0,
                    ignore_eos=True,
                    max_tokens=rng.randint(1, 120),
                    deadline_seconds=rng.choice([None, 30]),
                )
                engine.add_request(str(num_added), [rng.randrange(VOCAB_SIZE)] * rng.randint(1, 150), params)
                num_added += 1
            engine.step()
            if rng.random() < 0.005:
                engine.abort_request(rng.choice(list(engine.requests)))
        engine.runner.steps.clear()  # type: ignore[attr-defined]
        gc.collect()

    run(5000)
    tracemalloc.start()
    try:
        run(5000)
        before, resident_before = tracemalloc.get_traced_memory()[0], resident_bytes()
        for _ in range(9):
            run(10_000)
        after, resident_after = tracemalloc.get_traced_memory()[0], resident_bytes()
    finally:
        tracemalloc.stop()
    assert engine.stats().num_preemptions > 100
    print(f"traced {before} -> {after} bytes, resident {resident_before} -> {resident_after}")
    assert after - before < 100_000, "allocations grow with the steps"
    assert resident_after - resident_before < 8 << 20
