"""The estimator against torch's own per-operator counter on the engine's forward pass with the reference kernels.

The reference kernels compute some products whose result is thrown away: attention over unused slots, index scores of
positions that are not visible yet or outside the candidate blocks. A wrapper around the two operations counts those
from the tensors themselves, and they are taken off before comparing: like with like. So are the index keys of groups
that stay open in a decode step, whose shapes must not depend on whether a group closes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import deepinfer
from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import ModelConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.runner import ModelRunner
from deepinfer.kernels import ops, registry
from deepinfer.models.caches import CACHE_DTYPES
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.inputs import ModelInputs
from deepinfer.models.plan import plan_deployment
from deepinfer.models.random_weights import random_weights
from deepinfer.observability.flops import FlopsEstimator
from deepinfer.params import SamplingParams
from tests.configs import tiny_config, tiny_token_map

PACKAGE = Path(deepinfer.__file__).parent
BLOCK_SIZE = 128
SEQUENCES = 3


@dataclass
class Case:
    config: ModelConfig
    model: DeepseekV41


@pytest.fixture(scope="module", params=["tiny", "nano"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    if request.param == "tiny":
        config, token_map = tiny_config(), tiny_token_map()
    else:
        config = ModelConfig.from_file(PACKAGE / "checkpoints" / "nano")
        token_map = np.arange(config.vocab_size) % config.engram_compressed_vocab_size
    model = DeepseekV41(config, random_weights(config, seed=0), torch.from_numpy(token_map).long())
    yield Case(config, model)


@dataclass
class Waste:
    """FLOPs of results that nobody uses."""

    flops: int = 0


@contextmanager
def counted_waste(config: ModelConfig) -> Iterator[Waste]:
    """Reference kernels only, with the unused products counted from the arguments they get."""
    waste = Waste()
    attention, scores = ops.sparse_attention.reference, ops.index_scores.reference
    candidates = ops.mask_to_candidates.reference
    per_score = 2 * config.index_n_heads * (config.index_head_dim + 1)

    def watched_attention(q, window_cache, window_slots, latent_cache, latent_slots, sink, scale):
        unused = int((window_slots < 0).sum())
        if latent_cache is not None:
            unused += int((latent_slots < 0).sum())
        waste.flops += 4 * unused * q.shape[1] * q.shape[2]
        return attention(q, window_cache, window_slots, latent_cache, latent_slots, sink, scale)

    def watched_scores(iq, weights, cache, block_tables, sequence_of_row, visible):
        result = scores(iq, weights, cache, block_tables, sequence_of_row, visible)
        for sequence in sequence_of_row.unique():
            rows = sequence_of_row == sequence
            waste.flops += per_score * int((visible[rows].max() - visible[rows]).sum())
        return result

    def watched_candidates(given, kept, block_size):
        result = candidates(given, kept, block_size)
        waste.flops += per_score * int((torch.isfinite(given) & ~torch.isfinite(result)).sum())
        return result

    patch = pytest.MonkeyPatch()
    patch.setattr(registry, "FORCE_REFERENCE", True)
    patch.setattr(ops.sparse_attention, "reference", watched_attention)
    patch.setattr(ops.index_scores, "reference", watched_scores)
    patch.setattr(ops.mask_to_candidates, "reference", watched_candidates)
    try:
        yield waste
    finally:
        patch.undo()


def measure(case: Case, starts: list[int], counts: list[int], rows: int, keep_from: list[int] | None = None) -> int:
    """FLOPs of one step of sequences whose first starts[i] tokens are in zeroed caches."""
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    width = -(-max(ends) // BLOCK_SIZE)
    caches = case.model.allocate_caches(SEQUENCES * width + 1, BLOCK_SIZE, SEQUENCES + 1, CACHE_DTYPES["fp32"])
    total = sum(counts)
    query_start = np.concatenate(([0], np.cumsum(counts)))
    inputs = ModelInputs(
        is_prefill=max(counts) > 1,
        token_ids=torch.arange(total) % (case.config.vocab_size - 10) + 5,
        positions=torch.cat([torch.arange(s, e) for s, e in zip(starts, ends, strict=True)]),
        query_start=torch.tensor(query_start, dtype=torch.int32),
        context_lens=torch.tensor(ends, dtype=torch.int32),
        block_tables=torch.arange(1, len(starts) * width + 1, dtype=torch.int32).view(len(starts), width),
        state_slots=torch.arange(1, len(starts) + 1, dtype=torch.int32),
        logits_rows=torch.tensor(query_start[1 : rows + 1] - 1),
        keep_from=None if keep_from is None else torch.tensor(keep_from, dtype=torch.int32),
        drop_rows=keep_from is not None,
    )
    with counted_waste(case.config) as waste, FlopCounterMode(display=False) as counter:
        case.model.forward(inputs, caches)
    if not inputs.is_prefill:
        for layer in case.config.kv_source_layer_ids:
            open_groups = sum(end % case.config.compress_ratios[layer] > 0 for end in ends)
            waste.flops += 2 * open_groups * case.config.head_dim * case.config.index_head_dim
    return counter.get_total_flops() - waste.flops


STEPS = {
    "prefill from the start": ([0, 0, 0], [90, 41, 7], 3),
    "chunk of a prompt, no logits": ([260, 130], [64, 30], 0),
    "decode, short contexts": ([0, 3, 20], [1, 1, 1], 3),
    "decode, long contexts": ([700, 450, 1000], [1, 1, 1], 3),
}


@pytest.mark.parametrize("name", STEPS)
def test_estimate_is_within_2_percent_of_the_operator_counter(case: Case, name: str) -> None:
    starts, counts, rows = STEPS[name]
    counted = measure(case, starts, counts, rows)
    estimate = FlopsEstimator(case.config).step(np.array(starts), np.array(counts), rows).total
    assert estimate == pytest.approx(counted, rel=0.02)
    assert estimate == pytest.approx(counted, rel=1e-3), "today it is closer than asked"


def test_truncated_prefill(case: Case) -> None:
    starts, counts, keep_from = [0, 16], [200, 100], [150, 300]
    counted = measure(case, starts, counts, 1, keep_from)
    estimator = FlopsEstimator(case.config)
    estimate = estimator.step(np.array(starts), np.array(counts), 1, np.array(keep_from)).total
    assert estimate == pytest.approx(counted, rel=1e-3)
    assert estimate < 0.8 * estimator.step(np.array(starts), np.array(counts), 1).total


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "variable_length": False}},
        {"yoco_prefill_truncation_mode": "compact", "yoco_prefill_keep_tokens": 40},
    ],
    ids=["drafts", "yoco"],
)
def test_what_an_engine_reports_of_a_workload(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps of mixed requests, chunked, with rows of drafts and of prompt tokens: the sum that MFU comes from."""
    monkeypatch.setenv("DEEPINFER_PEAK_FLOPS", "1e12")  # else it is measured, by products that count
    config = tiny_config(2)
    model = DeepseekV41(config, random_weights(config, seed=0), torch.from_numpy(tiny_token_map()).long())
    engine_config = EngineConfig(
        block_size=16, num_blocks=60, max_num_seqs=4, prefill_chunk_size=24, max_num_batched_tokens=64,
        kv_cache_dtype="fp32", zero_overhead_scheduling=False, **options,
    )  # fmt: skip
    engine = Engine(ModelRunner(model, engine_config), engine_config)
    open_groups = 0
    run = engine.runner.run

    def counted(inputs: ModelInputs) -> torch.Tensor:
        nonlocal open_groups
        if not inputs.is_prefill:
            for layer in config.kv_source_layer_ids:
                open_groups += sum(end % config.compress_ratios[layer] > 0 for end in inputs.context_lens.tolist())
        return run(inputs)

    engine.runner.run = counted
    for number, asked in enumerate([None, 2]):
        text = [7 + number, 8, 9] * 30
        length = 50 + 10 * number
        params = SamplingParams(golden_token_ids=text[length : length + 6], prompt_logprobs=asked)
        engine.add_request(str(number), text[:length], params)
    with counted_waste(config) as waste, FlopCounterMode(display=False) as counter:
        while engine.has_unfinished_requests():
            engine.step()
    waste.flops += 2 * open_groups * config.head_dim * config.index_head_dim
    totals = engine.observer.stats.totals
    assert ("speculative_config" in options) == (totals.get("accepted", 0) > 0)
    assert totals["flops"] == pytest.approx(counter.get_total_flops() - waste.flops, rel=1e-3)


def test_chunks_add_up_to_the_whole_prompt(case: Case) -> None:
    estimator = FlopsEstimator(case.config)
    whole = estimator.step(np.array([0]), np.array([777]), 0)
    cuts = [0, 1, 130, 131, 500, 777]
    parts = [estimator.step(np.array([a]), np.array([b - a]), 0) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert sum(part.total for part in parts) == pytest.approx(whole.total, rel=1e-12) == whole.total


def test_agrees_with_the_plan_of_the_released_model() -> None:
    """Counted there from the checkpoint's tensors, here from the layers."""
    config = ModelConfig.from_file(PACKAGE / "config" / "deepseek_v41_flash.json")
    planned = plan_deployment(config, 8, 140 << 30, 32_768).flops_per_decode_token
    estimate = FlopsEstimator(config).step(np.array([32_767]), np.array([1]), 1).total
    assert estimate == pytest.approx(planned, rel=0.02)


def test_importing_it_needs_no_torch() -> None:
    code = "import sys, deepinfer.observability.flops; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
