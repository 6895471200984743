"""Engine output equals the naive reference's greedy output, token for token, for 200 random workloads.

In float64, so that no two logits are closer than the difference between two orders of summation: the comparison is
exact, with plain and with quantised caches. The oracle recomputes each finished sequence in one full pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.runner import ModelRunner
from deepinfer.models import reference
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.random_weights import random_weights
from deepinfer.params import SamplingParams
from tests.configs import tiny_config, tiny_token_map

CONFIG = tiny_config(max_position_embeddings=4096, hc_sinkhorn_iters=3)  # all 20 take a tenth of the time
TOKEN_MAP = torch.from_numpy(tiny_token_map()).long()


@cache
def weights() -> dict[str, torch.Tensor]:
    return {name: w.double() for name, w in random_weights(CONFIG, seed=0).items()}


@cache
def model() -> DeepseekV41:
    return DeepseekV41(CONFIG, dict(weights()), TOKEN_MAP)


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt_length: int
    max_tokens: int
    cancel_step: int | None
    seed: int

    def prompt(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(3, CONFIG.vocab_size, (self.prompt_length,), generator=generator).tolist()


# Mostly short, so that 200 workloads take minutes; about one in five holds a prompt of up to 2,000 tokens.
lengths = st.sampled_from([40] * 9 + [300] * 4 + [2000]).flatmap(lambda longest: st.integers(1, longest))


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[Arrival], EngineConfig]:
    arrivals = draw(
        st.lists(
            st.builds(
                Arrival,
                step=st.integers(0, 25),
                prompt_length=lengths,
                max_tokens=st.integers(1, 24),
                cancel_step=st.one_of(st.none(), st.none(), st.integers(0, 40)),
                seed=st.integers(0, 2**31),
            ),
            min_size=1,
            max_size=4,
        )
    )
    longest = max(a.prompt_length + a.max_tokens for a in arrivals)
    block_size = draw(st.sampled_from([2, 16, 128]))
    needed = -(-longest // block_size)
    config = EngineConfig(
        block_size=block_size,
        num_blocks=1 + needed + draw(st.integers(0, 6)),  # little more than one sequence: preemption is forced
        max_num_seqs=draw(st.integers(1, 4)),
        prefill_chunk_size=draw(st.integers(1 if longest < 330 else 48, 512)),
        max_num_batched_tokens=draw(st.integers(64, 1024)),
        kv_cache_dtype=draw(st.sampled_from(["fp64", "fp8"])),
        dtype="fp64",
        zero_overhead_scheduling=draw(st.booleans()),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
        swap_memory_bytes=1 << 24,
    )
    return arrivals, config


def run(arrivals: list[Arrival], config: EngineConfig) -> tuple[dict[int, list[int]], int]:
    """Generated tokens of every request that was not cancelled, and the number of preemptions."""
    engine = Engine(ModelRunner(model(), config), config, model().eos_token_ids)
    tokens: dict[int, list[int]] = {i: [] for i in range(len(arrivals))}
    cancelled: set[int] = set()
    step = 0
    while step <= max(a.step for a in arrivals) or engine.has_unfinished_requests():
        for i, arrival in enumerate(arrivals):
            if arrival.step == step:
                params = SamplingParams(temperature=0.0, max_tokens=arrival.max_tokens)
                engine.add_request(str(i), arrival.prompt(), params)
            if arrival.cancel_step == step and engine.abort_request(str(i)) is not None:
                cancelled.add(i)
        for output in engine.step():
            assert output.error is None, output.error
            for completion in output.outputs:
                tokens[int(output.request_id)] += completion.token_ids
        engine.scheduler.check_integrity()
        step += 1
        assert step < 20_000, "the engine spins"
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    return {i: t for i, t in tokens.items() if i not in cancelled}, stats.num_preemptions


def check(arrivals: list[Arrival], config: EngineConfig) -> int:
    outputs, preemptions = run(arrivals, config)
    numerics = reference.Numerics(quantize_kv=config.kv_cache_dtype == "fp8")
    for i, got in outputs.items():
        prompt = arrivals[i].prompt()
        whole = torch.tensor([prompt + got[:-1]])
        span = whole == CONFIG.image_token_id  # the id of every position of an image span, wherever it comes from
        logits = reference.forward(weights(), CONFIG, whole, TOKEN_MAP, numerics=numerics, image_span=span)[0]
        expected = logits[len(prompt) - 1 :].argmax(-1).tolist()
        assert got == expected, f"request {i} with a prompt of {len(prompt)} tokens"
        assert len(got) == arrivals[i].max_tokens or got[-1] == CONFIG.eos_token_id
    return preemptions


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(8))  # 8 x 25 workloads, spread over the test workers
def test_random_workloads(part: int) -> None:
    @seed(part)
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(workloads())
    def run_part(workload: tuple[list[Arrival], EngineConfig]) -> None:
        check(*workload)

    run_part()


def test_preemption_happens_and_changes_nothing() -> None:
    arrivals = [Arrival(step=0, prompt_length=30, max_tokens=40, cancel_step=None, seed=s) for s in range(4)]
    config = EngineConfig(block_size=4, num_blocks=1 + 40, max_num_seqs=4, dtype="fp64", kv_cache_dtype="fp8")
    assert check(arrivals, config) > 0
