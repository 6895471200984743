"""Counts of sampled steps against a count by hand, and that they come from the engine's own steps."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from deepinfer.bench.decode import add_requests
from deepinfer.bench.synthetic import benchmark_engine, benchmark_model
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.loading import resolve_model
from deepinfer.models.registry import load_model
from deepinfer.observability.expert_counts import ExpertCounts
from deepinfer.observability.stats import StepStats


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def routing(num_rows: int, num_layers: int = 3, num_experts: int = 8, k: int = 2, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_layers, num_rows, num_experts, generator=generator)
    return list(scores.topk(k).indices.int())


def count(chosen: list[torch.Tensor], num_rows: int, num_experts: int) -> list[list[int]]:
    counters = [Counter(expert for row in layer.tolist()[:num_rows] for expert in row) for layer in chosen]
    return [[counter[expert] for expert in range(num_experts)] for counter in counters]


def test_a_sample_leaves_padding_out_and_is_given_once() -> None:
    samples, chosen = ExpertCounts(clock=Clock()), routing(7)
    assert samples.take() is None
    samples.offer(chosen, 5, 3, 8)
    counts = samples.take()
    assert counts is not None and counts.tolist() == count(chosen, 5, 8) and counts.sum() == 3 * 5 * 2
    assert samples.take() is None


def test_samples_are_as_far_apart_as_asked_and_wait_to_be_taken() -> None:
    clock = Clock()
    samples = ExpertCounts(interval=1.0, clock=clock)
    steps = {now: routing(4, seed=int(now * 10)) for now in (10.0, 10.9, 11.1, 12.5, 13.7)}
    taken = []
    for now, chosen in steps.items():
        clock.now = now
        samples.offer(chosen, 4, 3, 8)
        if now != 12.5:  # what nobody takes is not replaced
            counts = samples.take()
            taken.append(None if counts is None else counts.tolist())
    assert taken == [count(steps[10.0], 4, 8), None, count(steps[11.1], 4, 8), count(steps[12.5], 4, 8)]


def test_a_step_whose_layers_see_different_rows_is_not_counted() -> None:
    samples = ExpertCounts(clock=Clock())
    samples.offer([*routing(4), *routing(2)], 4, 6, 8)
    samples.offer(routing(4), 4, 6, 8)  # half of the layers
    samples.offer([], 4, 3, 8)
    assert samples.take() is None


def test_a_record_over_truncated_prefill_has_every_layer() -> None:
    """Chunks of which no row reaches the decoder layers are left out; the steps behind them are counted."""
    model = benchmark_model("", "cpu", "v41-small", 6)
    config = EngineConfig(
        max_num_seqs=2, max_model_len=512, watermark=0.0, prefill_chunk_size=64,
        yoco_prefill_truncation_mode="compact", yoco_prefill_keep_tokens=sum(model.yoco_window or ()),
    )  # fmt: skip
    engine = benchmark_engine(model, config)
    engine.runner._expert_counts.interval = 0  # type: ignore[attr-defined]
    record = engine.observer.stats.experts
    record.start()
    add_requests(engine, 1, 400, 5)
    while engine.has_unfinished_requests():
        engine.step()
    assert record.counts is not None and len(record.counts) == 6
    tokens = record.counts.sum(1) / model.config.num_experts_per_tok
    assert len(set(tokens)) == 1 and tokens[0] >= 4  # the four decode steps at least, the same in every layer


@pytest.mark.parametrize("padded", [False, True])
def test_the_engine_counts_the_steps_of_its_model(padded: bool) -> None:
    """Also in the padded form of a step, the one that is captured on a GPU: its padding is not counted."""
    model = benchmark_model("", "cpu", "v41-small", 4)
    config = EngineConfig(max_num_seqs=8, max_model_len=64, watermark=0.0, cuda_graphs=padded)
    engine = benchmark_engine(model, config)
    add_requests(engine, 3, 20, 6)
    recorded: list[StepStats] = []
    engine.observer.stats.record = lambda step: bool(recorded.append(step))  # type: ignore[method-assign, func-returns-value]
    engine.runner._expert_counts.interval = 0  # type: ignore[attr-defined]
    chosen = []
    while engine.has_unfinished_requests():
        engine.step()
        chosen.append(model.chosen_experts)
    assert len(recorded) == len(chosen) == 6
    for step, experts in zip(recorded, chosen, strict=True):
        num_rows = step.num_prompt_tokens or 3
        assert [len(rows) for rows in experts] == [4 if padded and num_rows == 3 else num_rows] * 4
        assert step.expert_counts is not None
        assert step.expert_counts.tolist() == count(experts, num_rows, model.config.n_routed_experts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_sample_on_a_gpu_arrives_without_a_wait() -> None:
    clock = Clock()
    samples, chosen = ExpertCounts(clock=clock), [rows.cuda() for rows in routing(64)]
    samples.offer(chosen, 64, 3, 8)  # loads kernels
    torch.cuda.synchronize()
    samples.take()
    clock.now += 1
    torch.cuda._sleep(200_000_000)  # about 0.1 s of a busy device
    samples.offer(chosen, 64, 3, 8)
    assert samples.take() is None
    torch.cuda.synchronize()
    counts = samples.take()
    assert isinstance(counts, np.ndarray) and counts.tolist() == count([rows.cpu() for rows in chosen], 64, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replayed_steps_are_counted_as_eager_ones_are() -> None:
    """A replay overwrites the choices of its capture; padding rows, and the other graphs of the pool, do not show.

    Products of other shapes may round otherwise, so a few choices may differ.
    """
    model, recorded = load_model(resolve_model("nano"), torch.float32, "cuda"), []
    for captured in (False, True):
        config = EngineConfig(
            device="cuda",
            dtype="fp32",
            kv_cache_dtype="fp32",
            max_num_seqs=8,
            max_model_len=128,
            watermark=0.0,
            cuda_graphs=captured,
            zero_overhead_scheduling=False,  # so that every step has been read, and its counts with it
        )
        engine = benchmark_engine(model, config)
        engine.runner._expert_counts.interval = 0  # type: ignore[attr-defined]
        steps: list[StepStats] = []
        engine.observer.stats.record = lambda step, steps=steps: bool(steps.append(step))  # type: ignore[method-assign]
        add_requests(engine, 3, 20, 6)
        add_requests(engine, 2, 10, 9, seed=1)
        while engine.has_unfinished_requests():
            engine.step()
        recorded.append(steps)
    eager, replayed = recorded
    assert len(eager) == len(replayed) == 9
    for before, after in zip(eager, replayed, strict=True):
        assert before.expert_counts is not None and after.expert_counts is not None
        assert after.expert_counts.sum() == before.expert_counts.sum()
        moved = np.abs(after.expert_counts - before.expert_counts).sum() / 2
        assert moved <= 0.05 * before.expert_counts.sum()
    last = replayed[-1].expert_counts
    assert last is not None and last.sum() == len(last) * 2 * model.config.num_experts_per_tok
